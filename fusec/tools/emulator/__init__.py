"""Execute GPU kernels without a GPU: Triton's PTX, interpreted on a CPU and checked as it runs.

`parse` reads PTX, `decoded` makes a program of it by the table in `rules`, and `launch` runs that
with a kernel's arguments in the C++ interpreter (``engine/``). `faults` describes what was found,
by kernel, PTX line and line of the printed Triton source.
"""
