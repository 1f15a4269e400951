"""A stand-in for the CUDA driver, and a process that launches fusec's kernels over it."""
