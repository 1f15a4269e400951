"""Kernels: build, load and launch."""
