"""A `torch.compile` backend that runs a GPU's kernels in Triton's interpreter, on the CPU.

Everything but the device is real: capture, passes, the GPU schedules, the printer, the wrapper. So

    pytest -p tests.triton_backend tests/ops

with TEST_BACKEND=triton_interpreter runs any test of the backend over Triton kernels, and with
TEST_BACKEND=triton_fused over kernels that take products of matrices in as well. Use small tensors:
a grid point takes milliseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import register_backend

from fusec.backend import compile_with
from fusec.codegen.targets import find_target
from fusec.codegen.triton import argument_names, print_grid, print_kernel
from fusec.errors import Unsupported
from fusec.ir.program import Program
from fusec.options import Options
from fusec.pipeline import Compiled, compile_to_source
from fusec.runtime import executable
from fusec.trace import Trace
from tests.triton_interpreter import interpret

TARGET = "sm_90"


class InterpretedKernel:
    """Stands in for a loaded kernel: called with tensors, then sizes."""

    def __init__(self, program: Program) -> None:
        self.name = program.name
        self.source = print_kernel(program)
        self.sizes = argument_names(program)[len(program.buffers) :]
        self.grid = f"({', '.join(print_grid(program))})"

    def __call__(self, *args: Any) -> None:
        sizes = args[len(args) - len(self.sizes) :]
        grid = eval(self.grid, dict(zip(self.sizes, sizes, strict=True)))
        interpret(self.source, self.name, grid, args)


def gpu_pipeline(gm: fx.GraphModule, name: str, race: str = "library") -> Compiled:
    """Return an AOTAutograd graph compiled to Triton sources, verified at each stage."""
    options = Options.from_compile(None, {"strict": True, "verify": True, "race": race})
    return compile_to_source(gm, name, find_target(TARGET), options, Trace(name))


@register_backend
def triton_interpreter(
    gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any
) -> Callable[..., Any]:
    """Compile for a GPU, run the kernels by interpreter."""
    return compile_with(gm, example_inputs, _compile_one, Options.from_compile(None, None))


@register_backend
def triton_fused(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The same, with every product of matrices in a kernel that has something to fuse with it."""
    options = Options.from_compile(None, {"race": "fused"})
    compile_one = functools.partial(_compile_one, race="fused")
    return compile_with(gm, example_inputs, compile_one, options, scores=True)


def _compile_one(
    graph: fx.GraphModule, _: Sequence[Any], *, name: str, race: str = "library"
) -> Callable[[list[Any]], Any]:
    try:
        compiled = gpu_pipeline(graph, name, race)
    except Unsupported:
        call: Callable[[list[Any]], Any] = lambda args: graph(*args)  # noqa: E731
    else:
        kernels = {k: InterpretedKernel(p) for k, p in compiled.programs.items()}
        call = executable.bind(compiled.wrapper, kernels, graph, torch.device("cpu"))

    def boxed(args: list[Any]) -> Any:
        return call(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed
