"""A `torch.compile` backend that runs a GPU's kernels in Triton's interpreter, on the CPU.

Everything but the device is real: capture, passes, the GPU schedules, the printer, the wrapper. So

    pytest -p tests.triton_backend tests/ops

with TEST_BACKEND=triton_interpreter runs any test of the backend over Triton kernels, with
TEST_BACKEND=triton_fused over kernels that take products of matrices in as well, and with
TEST_BACKEND=triton_tiles over such kernels with tensor descriptors. Use small tensors: a grid point
takes milliseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import register_backend

from fusec.codegen.targets import find_target
from fusec.driver.backend import compile_with
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import Compiled, compile_to_source
from fusec.driver.trace import Trace
from fusec.errors import Unsupported
from fusec.ir.program import Program
from fusec.options import Options
from fusec.runtime.calls import executable
from fusec.runtime.calls.outside import of_graph
from fusec.runtime.calls.ranges import Ranges
from fusec.runtime.kernels import table
from fusec.runtime.kernels.triton_kernel import describe
from fusec.tools.verify.kernels import Verification
from tests.codegen.kernels import triton_source
from tests.triton_interpreter import interpret

TARGET = "sm_90"


class InterpretedKernel:
    """Stands in for a loaded kernel: called with tensors, then sizes.

    Like a launch, it goes by pointers where an address or a size is not the multiple of 16 that the
    kernel was promised.
    """

    def __init__(self, program: Program) -> None:
        self.kernel = triton_source(program)
        self.grid = f"({', '.join(self.kernel.grid)})"

    def __call__(self, *args: Any) -> None:
        values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
        kept = all(values[position] % 16 == 0 for position in self.kernel.divisible)
        kernel = self.kernel if kept else self.kernel.by_pointers()
        named = {name: arg for (name, _), arg in zip(kernel.signature, args, strict=False)}
        sizes = {name: arg for name, arg in named.items() if isinstance(arg, int)}
        tiles = describe(kernel, named, sizes)
        interpret(kernel.source, kernel.name, eval(self.grid, dict(sizes)), (*args, *tiles))


class InterpretedTable:
    """Stands in for a loaded kernel of a table: called with the rows' tensors and sizes."""

    def __init__(self, program: Program) -> None:
        self.kernel = triton_source(program)

    def __call__(self, rows: table.Rows, sizes: table.RowSizes) -> None:
        places = table.find_places(sizes, str(self.kernel.blocks))
        addresses = table.addresses(rows)
        kept = table.are_multiples(addresses, 16)
        source = self.kernel.source if kept else self.kernel.pointer_source
        arrays = [torch.tensor(addresses), places.sizes, places.places]
        interpret(source, self.kernel.name, (places.count, 1, 1), arrays)


def gpu_pipeline(gm: fx.GraphModule, name: str, **chosen: str) -> Compiled:
    """Return an AOTAutograd graph compiled to Triton sources, verified at each stage."""
    options = Options.from_compile(
        None, {"strict": True, "verify": True, "race": "library", **chosen}
    )
    return compile_to_source(gm, CompileContext(find_target(TARGET), options, Trace(name)))


def context(target: str = "cpu", **chosen: str) -> CompileContext:
    """Return the context of what comes before capture."""
    return CompileContext(find_target(target), Options.from_compile(None, chosen), Trace("joint"))


@register_backend
def triton_interpreter(
    gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any
) -> Callable[..., Any]:
    """Compile for a GPU, run the kernels by interpreter."""
    return compile_with(gm, example_inputs, _compile_one, context())


@register_backend
def triton_fused(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The same, with every product of matrices in a kernel that has something to fuse with it."""
    compile_one = functools.partial(_compile_one, race="fused")
    return compile_with(gm, example_inputs, compile_one, context(TARGET, race="fused"))


@register_backend
def triton_eager_rounding(
    gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any
) -> Callable[..., Any]:
    """The first one, rounding every 16-bit intermediate."""
    compile_one = functools.partial(_compile_one, precision="eager")
    return compile_with(gm, example_inputs, compile_one, context(precision="eager"))


@register_backend
def triton_tiles(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The same, with tiles of operands copied by tensor descriptors where they can be."""
    chosen = {"race": "fused", "descriptors": "always"}
    compile_one = functools.partial(_compile_one, **chosen)
    return compile_with(gm, example_inputs, compile_one, context(TARGET, **chosen))


def _compile_one(
    graph: fx.GraphModule, _: Sequence[Any], *, name: str, **chosen: str
) -> Callable[[list[Any]], Any]:
    try:
        compiled = gpu_pipeline(graph, name, **chosen)
    except Unsupported:
        call: Callable[[list[Any]], Any] = lambda args: graph(*args)  # noqa: E731
    else:
        kernels = {
            name: InterpretedTable(program) if program.table else InterpretedKernel(program)
            for name, program in compiled.programs.items()
        }
        call = executable.bind(
            compiled.wrapper,
            kernels,
            of_graph(graph),
            torch.device("cpu"),
            Ranges(name, compiled.statements(), dict),
            [Verification(graph, name, strict=True).hooks()],
        )

    def boxed(args: list[Any]) -> Any:
        return call(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed
