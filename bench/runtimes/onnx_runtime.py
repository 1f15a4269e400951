"""ONNX Runtime, of an exported program that becomes an ONNX model."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor


def prepared(program: torch.export.ExportedProgram, threads: int) -> Callable:
    """Return a function of tensors, whose session is as it is by default but for its threads.

    Raises:
        ImportError: without ONNX Runtime.
    """
    import onnxruntime  # a peer, which `make bench-peers` installs

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.log_severity_level = 3  # errors: warnings name each operation that stays as it is
    session = onnxruntime.InferenceSession(
        onnx_of(program), settings, providers=["CPUExecutionProvider"]
    )
    names = [given.name for given in session.get_inputs()]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return tuple(map(torch.from_numpy, session.run(None, given)))

    return run


def onnx_of(program: torch.export.ExportedProgram) -> bytes:
    """Return an ONNX model, in the set of operators that torch takes by default."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision is missing
    made = torch.onnx.export(program, dynamo=True, verbose=False)
    return made.model_proto.SerializeToString()
