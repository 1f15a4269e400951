"""Bind the names that a printed wrapper uses, and return its ``call``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from fusec.runtime.calls.clock import GraphClock
from fusec.runtime.calls.outside import GraphReferences
from fusec.runtime.calls.ranges import Ranges
from fusec.runtime.interior import OpOverload, empty_on_cpu, reinterpret

BoxedCall: TypeAlias = Callable[[list[Any]], Any]
"""Takes the arguments in one list, which it empties, so that memory is freed early."""

DTYPES = {
    "bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16,
    "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip


def window(base: torch.Tensor, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    """Return a strided view of ``base``, ``offset`` elements from its first."""
    return torch.as_strided(base, shape, strides, base.storage_offset() + offset)


def restride(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return ``tensor`` with the strides that were traced, copied only if it has others.

    Strides of axes of extent one, and of empty tensors, do not matter.
    """
    if tensor.stride() == strides:
        return tensor
    if tensor.numel() == 0 or all(
        n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), strides, strict=True)
    ):
        return tensor
    if 0 in strides:  # an expanded result: a dense copy cannot have these strides
        raise RuntimeError(
            f"an eager kernel returned strides {tensor.stride()}, {strides} were traced"
        )
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


class _Operators:
    """A namespace of operators, such as ``torch.ops.aten``, without torch's Python wrappers.

    A product costs 1.9 us to call as ``torch.mm`` and 2.7 as ``torch.ops.aten.mm.default``, a
    biased one 3.0 and 4.1 (2026-11).
    """

    def __init__(self, operators: Any) -> None:
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._operators, name)
        if isinstance(found, OpOverload):
            made: Any = _PYTHON.get(found, found._op)
        else:
            made = _Operators(found)
        setattr(self, name, made)
        return made


_PYTHON = {
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.addmm.default: torch.addmm,
}


def bind(
    source: str,
    kernels: Mapping[str, Callable[..., None]],
    outside: GraphReferences,
    device: torch.device,
    watch: Callable[..., None] | None = None,
    clock: GraphClock | None = None,
    ranges: Ranges | None = None,
) -> Callable[[list[Any]], Any]:
    """Return the ``call`` of a printed wrapper.

    Args:
        source: text printed by ``codegen.wrapper``.
        kernels: launchers by kernel name.
        outside: the eager callables and constants of its FX graph.
        watch: what a verified wrapper calls after each launch.
        ranges: the names of the call and of its launches under a profiler.
        clock: times both, by the names of ``ranges``; None outside of ``fusec.watch``.
    """

    def on_device(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    empty = empty_on_cpu if device.type == "cpu" else on_device

    def zeros(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made = empty(shape, strides, dtype)
        made.data.zero_()  # a version counter of its own: to autograd the tensor is new
        return made

    namespace: dict[str, Any] = {
        "empty": empty,
        "zeros": zeros,
        "window": window,
        "strided": reinterpret,
        "restride": restride,
        "watch": watch or (lambda *_: None),
        "aten": _Operators(torch.ops.aten),
        "mkl": _Operators(torch.ops.mkl),
        "mkldnn": _Operators(torch.ops.mkldnn),
        "ops": _Operators(torch.ops),
        **DTYPES,
        **outside.names(),
        **kernels,
    }
    return _watched(source, namespace, ranges, clock)


def _watched(
    source: str, namespace: Mapping[str, Any], ranges: Ranges | None, clock: GraphClock | None
) -> BoxedCall:
    """Return the ``call`` of a source, with its ranges and times if these are wanted."""
    if ranges is None:
        return _define(source, namespace)
    if clock is None:
        return ranges.around(_define(source, namespace), partial(_define_named, namespace))
    timed = _define_named(namespace, ranges.source, clock.named)
    return clock.graph(ranges.around(timed, partial(_define_timed, namespace, clock)))


def _define_named(
    namespace: Mapping[str, Any], source: str, named: Callable[..., Any]
) -> BoxedCall:
    """Return the ``call`` of a source whose launches are ``named(name, what, *arguments)``."""
    return _define(source, {**namespace, "named": named})


def _define_timed(
    namespace: Mapping[str, Any], clock: GraphClock, source: str, named: Callable[..., Any]
) -> BoxedCall:
    """Return the same, each launch timed inside the range that ``named`` opens."""

    def timed(name: str, *call: Any, **kwargs: Any) -> Any:
        return named(name, clock.named, name, *call, **kwargs)

    return _define_named(namespace, source, timed)


def _define(source: str, namespace: Mapping[str, Any]) -> BoxedCall:
    """Execute a source in a copy of a namespace, and return its ``call``."""
    own = dict(namespace)
    exec(compile(source, "<fusec wrapper>", "exec"), own)
    call: BoxedCall = own["call"]
    return call
