"""Read slices of tensors that Dynamo's graphs take, and join those at equally spaced places."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fusec.frontend.aliasing.overlap import called_name, tensor_of
from fusec.frontend.fx_passes.fx_nodes import called_with

_WHOLE = slice(None)


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
