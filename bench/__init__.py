"""Benchmarks: eager, Inductor and fusec side by side, in one process, in interleaved rounds.

`python -m bench.cpu` measures this machine, `python -m bench.compile_time` what a compile costs,
`python -m bench.gpu` an NVIDIA H200. Each writes one JSON file (the schema is `record.py`'s) that
is complete after every measurement, and prints a table.
"""
