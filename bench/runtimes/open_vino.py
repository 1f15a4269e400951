"""OpenVINO, of an exported program, or of its ONNX model where it lacks an operation of ATen."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.runtimes.onnx_runtime import onnx_of

SETTINGS = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
"""One request at a time, and all of it in `f32`: where a CPU has bf16 products it takes them."""


def prepared(program: torch.export.ExportedProgram, threads: int) -> Callable:
    """Return a function of tensors; what it returned is overwritten by its next call.

    Raises:
        ImportError: without OpenVINO.
    """
    os.environ.setdefault("CI", "true")  # where that is so, it reports nothing of its use
    import openvino  # a peer, which `make bench-peers` installs

    model = converted(program, openvino)
    settings = {**SETTINGS, "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    count = len(model.outputs)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        arrays = [tensor.numpy() for tensor in inputs]
        found = request.infer(arrays, share_inputs=True, share_outputs=True)
        return tuple(torch.from_numpy(found[k]) for k in range(count))

    return run


def converted(program: torch.export.ExportedProgram, openvino: Any) -> Any:
    """Return OpenVINO's model of a program."""
    try:
        return openvino.convert_model(program)
    except openvino.frontend.OpConversionFailure:
        return openvino.convert_model(io.BytesIO(onnx_of(program)))
