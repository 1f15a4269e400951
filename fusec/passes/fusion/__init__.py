"""Fusion: which definitions share a kernel, and which products remain library calls."""
