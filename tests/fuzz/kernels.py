"""Printed kernels on the interpreter's storage: what fuzz tests of printers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fusec.codegen.targets import Target
from fusec.driver.stages import FUSE
from fusec.ir.dtype import BF16, BOOL, F16, F32, F64, I32, I64, DType
from fusec.ir.graph import Kernel, Schedule
from fusec.ir.program import Program
from fusec.passes.stage import fold
from fusec.tools.interpreter.expression import Env, allocate
from fusec.tools.interpreter.graph import run_graph
from tests.fuzz.graphs import Example, copy_extern
from tests.fuzz.pipeline import context, lower_all

TORCH: dict[DType, torch.dtype] = {
    F32: torch.float32, F64: torch.float64, BF16: torch.bfloat16, F16: torch.float16,
    I64: torch.int64, I32: torch.int32, BOOL: torch.bool,
}  # fmt: skip

Launch = Callable[..., None]
"""Runs one kernel: ``launch(*tensors, *sizes)``, in the order of a program's arguments."""


def compile_example(drawn: Example, target: Target) -> tuple[Schedule, dict[str, Program]]:
    """Take a random graph through all passes; return its schedule and the program of each kernel.

    Raises:
        InvalidIR: where the verifier cannot prove an index to be in range.
    """
    schedule = fold(FUSE, drawn.graph, context(target))
    return schedule, lower_all(schedule, target)


def run_kernels(
    schedule: Schedule,
    programs: dict[str, Program],
    inputs: tuple[Any, ...],
    kernel: Callable[[Program], Launch],
) -> list[Any]:
    """Return what a schedule's graph returns, computed by printed kernels."""

    def run(step: Kernel, env: Env) -> None:
        launch_on(env, programs[step.name], kernel(programs[step.name]))

    return run_graph(schedule, inputs, copy_extern, run)


def launch_on(env: Env, program: Program, launch: Launch) -> None:
    """Launch a kernel on the storage of an interpreter's environment."""
    tensors = {}
    for argument in program.buffers:
        if argument not in env.storage:
            allocate(argument, env)
        array = torch.from_numpy(np.ascontiguousarray(env.storage[argument]))
        tensors[argument] = array.to(TORCH[argument.dtype]).contiguous()
    launch(*tensors.values(), *(int(env.sizes[s]) for s in program.sizes))
    for argument, tensor in tensors.items():
        held = env.storage[argument]
        widened = tensor.float() if argument.dtype in (BF16, F16) else tensor
        held[...] = widened.numpy().astype(held.dtype)
