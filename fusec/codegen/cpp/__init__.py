"""Printing programs as C++ kernels."""
