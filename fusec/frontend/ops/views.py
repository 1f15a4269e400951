"""Views: the same elements under other indices. Nothing is emitted.

A reshape reads the digits of an element's row-major number, which simplify where axes are merged or
split: [B, T, C] -> [B*T, C] reads (m//T, m%T, c).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices
from fusec.frontend.ops.registry import aten, lowers
from fusec.frontend.shapes import from_end
from fusec.frontend.value import ONE, ZERO, Value, broadcast, is_whole
from fusec.ir.index import Index, index
from fusec.ir.strides import contiguous_strides

IntoSize: TypeAlias = "int | Index"


def wrap(dim: int, rank: int) -> int:
    """Return a dimension counted from the front, given one that may count from the end."""
    return dim + rank if dim < 0 else dim


# -- reshapes -------------------------------------------------------------------------------------


@lowers(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def reshape(call: AtenCall, x: Value, *_: Any) -> Value:
    return call.view(x, lambda at: reshape_indices(x.shape, call.out.shape, at))


def reshape_indices(old: Indices, new: Indices, at: Indices) -> Indices:
    """Return the indices into ``old`` of the element at ``at`` of ``new``, both row-major."""
    return delinearise(linearise(at, new), old)


def linearise(at: Indices, shape: Indices) -> Index:
    """Return the row-major number of the element of ``shape`` at some indices."""
    return strided(at, contiguous_strides(shape))


def strided(at: Indices, strides: Indices) -> Index:
    return sum((i * step for i, step in zip(at, strides, strict=True)), ZERO)


def delinearise(linear: Index, shape: Indices) -> Indices:
    """Return the row-major indices into ``shape`` of the element number ``linear``.

    The innermost first: what is left after a division has no axis of the digits before.
    """
    digits: list[Index] = []
    for k in reversed(range(len(shape))):
        is_outermost = all(extent is ONE for extent in shape[:k])
        digits.append(ZERO if shape[k] is ONE else linear if is_outermost else linear % shape[k])
        linear = linear // shape[k]
    return tuple(reversed(digits))


# -- permutations and expansions ------------------------------------------------------------------


@lowers(aten.permute.default)
def permute(call: AtenCall, x: Value, dims: Sequence[int]) -> Value:
    order = [wrap(d, len(x.shape)) for d in dims]
    return call.view(x, lambda at: tuple(at[order.index(k)] for k in range(len(order))))


@lowers(aten.expand.default)
def expand(call: AtenCall, x: Value, *_: Any, **__: Any) -> Value:
    return call.view(x, lambda at: broadcast(at, x.shape))


@lowers(
    aten.alias.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.lift.default,
)
def alias(call: AtenCall, x: Value, *_: Any, **__: Any) -> Value:
    return x


# -- windows --------------------------------------------------------------------------------------


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_tensor(
    call: AtenCall,
    x: Value,
    dim: int = 0,
    start: IntoSize | None = None,
    end: IntoSize | None = None,
    step: IntoSize = 1,
) -> Value:
    axis = wrap(dim, len(x.shape))
    first = call.lines.sizes.slice_start(start, x.shape[axis])
    return call.view(x, lambda at: replaced(at, axis, first + at[axis] * index(step)))


def replaced(at: Indices, axis: int, position: Index) -> Indices:
    """Return indices with the one of ``axis`` replaced."""
    return (*at[:axis], position, *at[axis + 1 :])


@lowers(aten.select.int, aten.select_copy.int)
def select(call: AtenCall, x: Value, dim: int, position: IntoSize) -> Value:
    axis = wrap(dim, len(x.shape))
    chosen = from_end(position, x.shape[axis])
    return call.view(x, lambda at: (*at[:axis], chosen, *at[axis:]))


@lowers(aten.split_with_sizes.default, aten.split.Tensor, aten.split_copy.Tensor)
def split(call: AtenCall, x: Value, _: Any, dim: int = 0) -> tuple[Value, ...]:
    axis = wrap(dim, len(x.shape))
    starts = itertools.accumulate((kind.shape[axis] for kind in call.results), initial=ZERO)

    def part(result: int, start: Index) -> Value:
        return call.view(x, lambda at: replaced(at, axis, start + at[axis]), result)

    return tuple(itertools.starmap(part, enumerate([*starts][:-1])))


@lowers(aten.unfold.default)
def unfold(call: AtenCall, x: Value, dim: int, size: IntoSize, step: IntoSize) -> Value:
    """Return windows of ``size`` elements, ``step`` apart; the last axis runs within a window."""
    axis = wrap(dim, len(x.shape))
    if not x.shape:
        return call.view(x, lambda at: ())
    return call.view(x, lambda at: replaced(at[:-1], axis, at[axis] * index(step) + at[-1]))


@lowers(aten.flip.default)
def flip(call: AtenCall, x: Value, dims: Sequence[int]) -> Value:
    flipped = {wrap(d, len(x.shape)) for d in dims}

    def where(at: Indices) -> Indices:
        return tuple(x.shape[k] - 1 - i if k in flipped else i for k, i in enumerate(at))

    return call.view(x, where)


@lowers(aten.diagonal.default)
def diagonal(call: AtenCall, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """Return a diagonal, whose elements the last axis enumerates."""
    rank = len(x.shape)

    def where(at: Indices) -> Indices:
        rest, along = iter(at[:-1]), at[-1]
        place = {
            wrap(dim1, rank): along + max(-offset, 0),
            wrap(dim2, rank): along + max(offset, 0),
        }
        return tuple(place[k] if k in place else next(rest) for k in range(rank))

    return call.view(x, where)


@lowers(aten.as_strided.default)
def as_strided(
    call: AtenCall,
    x: Value,
    size: Sequence[IntoSize],
    stride: Sequence[IntoSize],
    storage_offset: IntoSize | None = None,
) -> Value:
    """Return a strided window of a tensor that is all of a row-major buffer."""
    if x.buffer is None or not is_whole(x) or not x.buffer.is_row_major:
        raise Unsupported("a strided window into other than a contiguous tensor")

    def where(at: Indices) -> Indices:
        linear = index(storage_offset or 0) + strided(at, tuple(map(index, stride)))
        return delinearise(linear, x.shape)

    return call.view(x, where)
