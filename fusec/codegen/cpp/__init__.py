"""Programs as C++ kernels."""
