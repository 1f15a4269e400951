"""Lowering: from a kernel and its plan to a program."""
