"""A compiled graph's call: binding, calling convention, CUDA graphs, profiling."""
