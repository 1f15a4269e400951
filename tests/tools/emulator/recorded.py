"""Launches of fusec's own kernels, recorded while a program runs in the emulator.

A launch can be run again with its PTX, its descriptors or its grid changed: that plants a fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from fusec.tools.emulator.decode import decoded
from fusec.tools.emulator.faults import EmulationError, Fault
from fusec.tools.emulator.launch import Arguments, Compiled, EmulatedKernel, launch
from fusec.tools.emulator.parse import parse
from fusec.tools.report.emulation import Emulator
from tests.calls import calls_of


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch of a kernel; its tensors are kept alive."""

    compiled: Compiled
    args: tuple[Any, ...]
    grid: tuple[int, ...]

    def fault(
        self,
        edit: Callable[[str], str] = str,
        given: Callable[[Arguments], Arguments] = lambda arguments: arguments,
        grid: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> Fault | None:
        """Run again with something changed; return the fault that this has."""
        ptx = self.compiled.code.ptx
        changed = edit(ptx)
        assert edit is str or changed != ptx, "the PTX has nothing to change"
        code = replace(self.compiled.code, program=decoded(parse(changed)), ptx=changed)
        arguments = given(self.compiled.arguments(self.args))
        try:
            launch(code, grid or self.grid, arguments, seed, limit=20_000_000)
        except EmulationError as error:
            return error.fault
        return None


def record(
    fn: Callable[..., Any],
    *inputs: torch.Tensor,
    train: bool = False,
    target: str = "sm_90",
    **options: str,
) -> list[Launched]:
    """Run a function, and its backward to train it, in the emulator; return launches in order."""
    emulator = Emulator.of(target, {"race": "fused", **options})
    torch._dynamo.reset()
    given = [x.detach().requires_grad_(train) for x in inputs]
    with calls_of(EmulatedKernel.__call__) as calls, torch.set_grad_enabled(train):
        made = torch.compile(fn, backend=emulator.backend, dynamic=False)(*given)
        if train:
            made.backward(torch.ones_like(made))
    return [launched(call.arguments["self"], call.arguments["args"]) for call in calls]


def launched(kernel: EmulatedKernel, args: tuple[Any, ...]) -> Launched:
    """Return the launch that a call of a kernel would make."""
    values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
    kept = tuple(p for p in kernel.kernel.divisible if values[p] % 16 == 0)
    compiled = kernel._variant(kept)
    pairs = zip(compiled.kernel.signature, args, strict=False)
    sizes = {name: arg for (name, _), arg in pairs if isinstance(arg, int)}
    grid = tuple(eval(extent, {}, dict(sizes)) for extent in kernel.kernel.grid)
    return Launched(compiled, args, grid)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    """Return random numbers, the same each time."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


@functools.cache
def softmax(target: str = "sm_90") -> Launched:
    """A row of 1000 in 1024 lanes: masked loads and stores."""
    (one,) = record(lambda x: x.softmax(-1), normal(3, 1000), target=target)
    return one


@functools.cache
def layer_norm(target: str = "sm_90", dependent: str = "never") -> Launched:
    """Rows over several warps, which add up in shared memory."""
    w, b = normal(4096), normal(4096, scale=0.5)
    options = {"target": target, "dependent_launches": dependent}
    (one,) = record(lambda x: F.layer_norm(x, (4096,), w, b), normal(4, 4096), **options)
    return one


@functools.cache
def linear(descriptors: str, target: str = "sm_90", dependent: str = "never") -> Launched:
    """A ragged product with an epilogue: by cp.async, or by descriptors, on tensor cores."""
    x, w, b = normal(200, 264), normal(328, 264, scale=0.06), normal(328)
    options = {"descriptors": descriptors, "dependent_launches": dependent}
    (one,) = record(lambda x: F.gelu(F.linear(x, w, b)), x, target=target, **options)
    return one


@functools.cache
def computed(target: str = "sm_90") -> Launched:
    """A product whose left operand is computed; the right one comes by descriptors."""
    x, w, y = normal(136, 512), normal(264, 512, scale=0.06), normal(136, 264)
    (one,) = record(lambda x: F.linear(F.gelu(x), w) + y, x, target=target, descriptors="always")
    return one


def without(text: str, number: int = 0) -> Callable[[str], str]:
    """Return an edit that drops the n-th line with a text."""
    return changed(text, lambda line: "", number)


def with_instead(text: str, other: str, number: int = 0) -> Callable[[str], str]:
    """Return an edit that writes something else in the n-th line with a text."""
    return changed(text, lambda line: line.replace(text, other), number)


def changed(text: str, change: Callable[[str], str], number: int) -> Callable[[str], str]:
    def edit(ptx: str) -> str:
        lines = ptx.splitlines()
        at = [n for n, line in enumerate(lines) if text in line][number]
        lines[at] = change(lines[at])
        return "\n".join(lines)

    return edit


def first_map(**fields: Any) -> Callable[[Arguments], Arguments]:
    """Return a change of the first descriptor's fields, each by a function of its old value."""

    def change(arguments: Arguments) -> Arguments:
        values = list(arguments.values)
        at = next(n for n, value in enumerate(values) if not isinstance(value, int))
        old = values[at]
        values[at] = replace(old, **{name: f(getattr(old, name)) for name, f in fields.items()})
        return replace(arguments, values=tuple(values))

    return change
