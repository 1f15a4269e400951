"""Runtimes that take an exported program: OpenVINO and ONNX Runtime, peers of `bench.peers`.

Each has a module with `prepared(program, threads)`, which makes of what `torch.export` returns a
function of tensors. They compile for `f32` and a number of threads, and run as their users run them
for one request at a time: inputs are not copied, outputs lie in the runtime's memory until the
next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.runtimes import onnx_runtime, open_vino

RUNTIMES = {"openvino": open_vino.prepared, "onnxruntime": onnx_runtime.prepared}


class Entry(nn.Module):
    """What is exported of a function: a module that calls it, with its weights if it has any."""

    def __init__(self, call: Callable) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.call(*inputs)


def compiled(call: Callable, peer: str) -> Callable:
    """Return a function that exports and compiles when it is first called, with those inputs."""
    ready: Callable | None = None

    def run(*inputs: torch.Tensor) -> Any:
        nonlocal ready
        if ready is None:
            program = torch.export.export(Entry(call), inputs, strict=False)
            ready = RUNTIMES[peer](program, torch.get_num_threads())
        return ready(*inputs)

    return run
