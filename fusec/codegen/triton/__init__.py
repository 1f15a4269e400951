"""Printing programs as Triton and Gluon kernels."""
