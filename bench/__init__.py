"""Benchmarks: eager, Inductor and fusec side by side, in one process, in interleaved rounds.

`python -m bench.cpu` measures this machine, `python -m bench.peers` it beside OpenVINO and ONNX
Runtime, `python -m bench.compile_time` what a compile costs, `python -m bench.start` how long a
built model takes to start, `python -m bench.gpu` an NVIDIA H200, `python -m bench.cpp_flags` sets
of compiler flags. All print a table; all but the last write one JSON file each (the schema is
`record.py`'s) that is complete after every measurement.
"""
