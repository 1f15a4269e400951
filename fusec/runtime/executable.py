"""A compiled graph, ready to run: binds the names that a printed wrapper uses and calls it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from fusec.runtime.clock import GraphClock
from fusec.runtime.ranges import Ranges
from fusec.torch_interior import OpOverload, empty_on_cpu, reinterpret

BoxedCall: TypeAlias = Callable[[list[Any]], Any]
"""Takes the arguments in one list, which it empties, so that memory is free as soon as may be."""

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
    """A namespace of operators, such as ``torch.ops.aten``, without the Python around each.

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
    gm: fx.GraphModule,
    device: torch.device,
    parts: Mapping[str, Callable[..., Any]] | None = None,
    watch: Callable[..., None] | None = None,
    clock: GraphClock | None = None,
    ranges: Ranges | None = None,
) -> Callable[[list[Any]], Any]:
    """Return the ``call`` of a printed wrapper.

    Args:
        source: text printed by ``codegen.wrapper``.
        kernels: launchers by kernel name.
        gm: the FX graph, which holds eager callables and constants by node name.
        parts: what is called in the place of the graph's attributes of these names.
        watch: what a verified wrapper calls after each launch.
        ranges: names the call and what it launches where a profiler runs.
        clock: times both, by the names of ``ranges``, if somebody watches.
    """
    nodes = {node.name: node for node in gm.graph.nodes}

    def constant(name: str, path: tuple[str | int, ...]) -> Any:
        node = nodes[name]
        value: Any = node
        for step in path:
            value = getattr(value, step) if isinstance(step, str) and value is node else value[step]
        if not (isinstance(value, fx.Node) and value.op == "get_attr"):
            return value
        own = (parts or {}).get(str(value.target)) if path else None
        return operator.attrgetter(str(value.target))(gm) if own is None else own

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
        "constant": constant,
        "watch": watch or (lambda *_: None),
        "aten": _Operators(torch.ops.aten),
        "mkldnn": _Operators(torch.ops.mkldnn),
        **DTYPES,
        **kernels,
    }
    calls = [node for node in nodes.values() if node.op == "call_function"]
    namespace.update((f"extern_{node.name}", _callee(node)) for node in calls)
    return _watched(source, namespace, ranges, clock)


def _watched(
    source: str, namespace: Mapping[str, Any], ranges: Ranges | None, clock: GraphClock | None
) -> BoxedCall:
    """Return the ``call`` of a source, seen by what watches it."""
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
    """Return the same, each launch timed within what ``named`` does."""

    def timed(name: str, *call: Any, **kwargs: Any) -> Any:
        return named(name, clock.named, name, *call, **kwargs)

    return _define_named(namespace, source, timed)


def _define(source: str, namespace: Mapping[str, Any]) -> BoxedCall:
    """Return the ``call`` of a source, which defines its functions in a namespace of its own."""
    own = dict(namespace)
    exec(compile(source, "<fusec wrapper>", "exec"), own)
    call: BoxedCall = own["call"]
    return call


def _callee(node: fx.Node) -> Any:
    """Return what a node calls; operations that take tuples or dictionaries get what was traced.

    A wrapper prints lists of values, which operators of torch take in the place of tuples. A
    dictionary of results becomes a list of its values, too.
    """
    target: Any = node.target
    others = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, tuple | dict)]
    if isinstance(target, OpOverload) or not others:
        return target

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: _like(node.kwargs[name], value) for name, value in kwargs.items()}
        result = target(*map(_like, node.args, args), **named)
        return [result[k] for k in node.meta["val"]] if isinstance(result, dict) else result

    return call


def _like(traced: Any, value: Any) -> Any:
    """Return a sequence or dictionary, and those in it, of the kind that was traced."""
    if not isinstance(traced, tuple | list | dict) or not isinstance(value, tuple | list):
        return value
    if isinstance(traced, dict):
        return dict(zip(traced, map(_like, traced.values(), value), strict=True))
    items = map(_like, traced, value)
    return tuple(items) if isinstance(traced, tuple) else list(items)
