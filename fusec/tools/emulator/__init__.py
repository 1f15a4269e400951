"""GPU kernels executed without a GPU: Triton's PTX, run on a CPU and checked as it runs.

`parse` reads PTX, `decoded` makes a program of it, by the table in `rules`, that the interpreter in
C++ (``engine/``) runs, `launch` does so with a kernel's arguments; `faults` says what was found:
by kernel, PTX line and line of the printed Triton source.
"""
