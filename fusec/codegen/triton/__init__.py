"""Programs as Triton and Gluon kernels."""
