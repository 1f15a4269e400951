"""Read columns of Dynamo's graphs: what equal calls of all iterations of a loop have at one place.

Equal calls have columns of arguments (``arguments_of``), and may be made of all iterations at once
(``each``). Slices of one tensor at equally spaced places are one slice (``joined``)::

    x[:, 3], x[:, 5], x[:, 7]      x[:, 3:8:2], along axis 1
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusec.frontend.aliasing.overlap import called_name, tensor_of, written_by
from fusec.frontend.fx_passes.fx_nodes import called_with
from fusec.ir.expr import reach
from fusec.torch_interior import EXAMPLE, OpOverload, OpOverloadPacket, pytree, qualified_name

Column: TypeAlias = tuple[Any, ...]
"""What stands at one place of each iteration."""
_WRITERS = ("batch_norm", "instance_norm", "__setitem__", "__iadd__", "__isub__", "__imul__")
"""Calls that write without a name that says so: running statistics, methods of operators."""
_OWN = (".", "torch.", "_operator.", "math.")
_OTHERS = ("torch.ops.", "torch._higher_order_ops.")
_PLAIN = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size, int, float)
"""Types of values of calls without another effect, such as a mode."""
_WHOLE = slice(None)
_INPUTS = operator.attrgetter("all_input_nodes")


class StaysError(Exception):
    """A column has no rolled form."""


@dataclass(frozen=True, slots=True)
class Rolled:
    """The rolled form of a column.

    Attributes:
        node: a tensor with the iterations in front; if not ``varies`` the value of all iterations.
    """

    node: Any
    varies: bool


def each(name: str, axes: Any, args: Any, kwargs: Any) -> Any:
    """Call a function for all iterations at once.

    Args:
        name: as ``function_of`` takes it.
        axes: 0 for each argument that has the iterations in front, None for others, in the
            structure of ``(args, kwargs)``.

    Raises:
        RuntimeError: if the function draws random numbers.
    """
    function = function_of(name)

    def once(args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.vmap(once, axes, randomness="error")(args, kwargs)


def name_of(call: fx.Node) -> str | None:
    """Return the name of what a node calls; None if ``function_of`` does not find it."""
    if call.op == "call_method":
        return f".{call.target}"
    name = qualified_name(call.target) if callable(call.target) else ""
    return name if function_of(name) is call.target else None


def function_of(name: str) -> Any:
    """Return a function of a qualified name, or a method of one that begins with a dot."""
    if name.startswith("."):
        return lambda x, *args, **kwargs: getattr(x, name[1:])(*args, **kwargs)
    root, *path = name.split(".")
    found: Any = sys.modules.get(root)
    for part in path:
        found = getattr(found, part, None)
    return found


def may_be_called(node: fx.Node) -> bool:
    """Return True for a call of torch's own that writes nothing."""
    name = name_of(node) if node.op in ("call_function", "call_method") else None
    if name is None or writes(node):
        return False
    return name.startswith(_OWN) and not name.startswith(_OTHERS)


def writes(node: fx.Node) -> bool:
    """Return True for a call that writes an argument, or that may have another effect."""
    if not node.op.startswith("call"):
        return False
    value, target = node.meta.get(EXAMPLE), node.target
    items = value if isinstance(value, tuple | list) else (value,)
    overloads = [target] if isinstance(target, OpOverload) else []
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    by_schema = any(overload._schema.is_mutable for overload in overloads)
    named = called_name(node) in _WRITERS or node.op == "call_module"
    silent = not all(isinstance(item, _PLAIN) for item in items)
    return named or by_schema or silent or any(x is not None for x in written_by(node))


def arguments_of(column: Column) -> tuple[Any, list[Column]] | None:
    """Return the arguments of equal calls as columns, and their form; None for other calls."""
    first = column[0]
    if not isinstance(first, fx.Node) or not first.op.startswith("call_"):
        return None
    found = []
    for item in column:
        if not isinstance(item, fx.Node) or (item.op, item.target) != (first.op, first.target):
            return None
        found.append(pytree.tree_flatten((item.args, dict(item.kwargs))))
    form = found[0][1]
    if any(other != form for _, other in found):
        return None
    return form, list(zip(*(leaves for leaves, _ in found), strict=True))


def closure(
    nodes: Iterable[fx.Node], beside: Callable[[fx.Node], Iterable[fx.Node]] = _INPUTS
) -> set[fx.Node]:
    """Return nodes, those beside them, and so on: all that they follow from, unless told."""
    return set(reach(nodes, beside))


# -- values ----------------------------------------------------------------------------------------


def are_alike(nodes: Sequence[Any]) -> bool:
    """Return True for tensors of one shape, type and device."""
    first = tensor_of(nodes[0])
    return first is not None and all(has_elements(tensor_of(node), first) for node in nodes)


def has_shape(x: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Return True for a tensor that is known to have a shape."""
    pairs = zip(x.shape, shape, strict=False)
    return x.dim() == len(shape) and all(statically_known_true(a == b) for a, b in pairs)


def has_elements(value: Any, item: Any, *rows: int) -> bool:
    """Return True for an item's shape and type behind axes of rows, and for tuples of such."""
    if isinstance(item, torch.Tensor) and isinstance(value, torch.Tensor):
        alike = (value.dtype, value.device) == (item.dtype, item.device)
        return alike and has_shape(value, (*rows, *item.shape))
    if isinstance(item, tuple | list) and isinstance(value, tuple | list):
        pairs = zip(value, item, strict=False)
        return len(value) == len(item) and all(has_elements(a, b, *rows) for a, b in pairs)
    return not rows and type(value) is type(item) and statically_known_true(value == item)


def is_same(column: Column) -> bool:
    """Return True for one node in all iterations, and for equal constants."""
    first = column[0]
    if isinstance(first, fx.Node):
        return all(item is first for item in column)
    return all(
        item is first or (type(item) is type(first) and repr(item) == repr(first))
        for item in column
    )


# -- slices ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subscript:
    """A part of a tensor: ``source[index]``, of integers, slices, None and one ellipsis at most."""

    source: fx.Node
    index: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices of one tensor: ``source[index]``, in which ``axis`` runs over them.

    Attributes:
        width: the extent of each slice along ``axis``; None if each is one element of the axis,
            selected by an integer. With a width, ``axis`` of the whole has to be split in two: the
            slices, and the elements of a slice.
        turned: whether the last one is the first in memory.
    """

    source: fx.Node
    index: tuple[Any, ...]
    axis: int
    width: int | None
    turned: bool


def subscript_of(node: Any) -> Subscript | None:
    """Return the part of a tensor that a node is; None for any other value."""
    if not isinstance(node, fx.Node):
        return None
    source: Any
    index: Any
    if node.target is operator.getitem:
        source, index = node.args
        index = index if isinstance(index, tuple) else (index,)
        if isinstance(source, fx.Node) and called_name(source) in _LISTS:
            found = called_with(_LISTS[called_name(source)], source)
            number = index[0]
            if found is None or type(number) is not int or number < 0:
                return None
            source, index = found[0], found[1](number)
    else:
        selection = _SELECTIONS.get(called_name(node))
        source, index = (selection and called_with(selection, node)) or (None, ())
    plain = sum(item is Ellipsis for item in index) <= 1 and all(map(is_plain, index))
    return Subscript(source, index) if plain and tensor_of(source) is not None else None


def joined(parts: Sequence[Subscript | None]) -> Slices | None:
    """Return parts of a tensor that lie at equally spaced places along an axis; None for others."""
    first = parts[0]
    if first is None or any(p is None or p.source is not first.source for p in parts):
        return None
    indices = [part.index for part in parts if part is not None]
    if any(len(index) != len(first.index) for index in indices):
        return None
    columns = list(zip(*indices, strict=True))
    differing = [k for k, items in enumerate(columns) if any(item != items[0] for item in items)]
    if len(differing) != 1:
        return None
    (k,) = differing
    tensor = tensor_of(first.source)
    assert tensor is not None
    left = tensor.dim() - sum(x is not None and x is not Ellipsis for x in first.index)
    before = first.index[:k]
    dimension = sum(left if x is Ellipsis else x is not None for x in before)
    axis = sum(left if x is Ellipsis else not isinstance(x, int) for x in before)
    spans = [_span(item, tensor.shape[dimension]) for item in columns[k]]
    starts = [span[0] for span in spans if span is not None]
    widths = {span[1] for span in spans if span is not None}
    steps = {b - a for a, b in itertools.pairwise(starts)}
    if len(starts) < len(spans) or len(widths) != 1 or len(steps) != 1 or 0 in steps:
        return None
    (width,), (step,) = widths, steps
    if width not in (None, 1, abs(step)):
        return None
    stride = 1 if width == abs(step) else abs(step)
    low, high = min(starts), max(starts) + (width or 1)
    index = (*before, slice(low, high, stride), *first.index[k + 1 :])
    return Slices(first.source, index, axis, width, step < 0)


def _span(item: Any, extent: Any) -> tuple[int, int | None] | None:
    """Return where an integer or a slice begins, and a slice's width; None for other items."""
    if type(item) is int:
        if item < 0:
            return (item + extent, None) if isinstance(extent, int) else None
        return item, None
    if not isinstance(item, slice) or item.step not in (None, 1) or not isinstance(extent, int):
        return None
    start, stop, _ = item.indices(extent)
    return (start, stop - start) if stop > start else None


def is_plain(item: Any) -> bool:
    """Return True for an integer, a slice of integers, None or an ellipsis."""
    if isinstance(item, slice):
        return all(x is None or type(x) is int for x in (item.start, item.stop, item.step))
    return item is None or item is Ellipsis or type(item) is int


def _at(source: Any, dim: int, item: Any) -> tuple[Any, tuple[Any, ...]]:
    tensor = tensor_of(source)
    axis = dim % max(tensor.dim(), 1) if tensor is not None and type(dim) is int else 0
    return source, (*(_WHOLE,) * axis, item)


def _select(input: Any, dim: int, index: Any) -> Any:
    return _at(input, dim, index)


def _narrow(input: Any, dim: int, start: Any, length: Any) -> Any:
    known = type(start) is int and type(length) is int and start >= 0
    return _at(input, dim, slice(start, start + length)) if known else None


def _unbind(input: Any, dim: int = 0) -> Any:
    return input, lambda k: _at(input, dim, k)[1]


def _split(tensor: Any, split_size: Any, dim: int = 0) -> Any:
    if type(split_size) is not int:
        return None
    return tensor, lambda k: _at(tensor, dim, slice(k * split_size, (k + 1) * split_size))[1]


_SELECTIONS: Mapping[str, Callable[..., Any]] = {"select": _select, "narrow": _narrow}
_LISTS: Mapping[str, Callable[..., Any]] = {"unbind": _unbind, "split": _split}
