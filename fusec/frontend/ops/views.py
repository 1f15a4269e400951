"""Views: the same elements under other indices. Nothing is emitted.

A reshape pairs up the axes of both shapes in the smallest groups of equal size, so that no index is
more complicated than it must be: [B, T, C] -> [B*T, C] reads (m//T, m%T, c).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices
from fusec.frontend.ops.registry import lowers
from fusec.frontend.value import ONE, ZERO, Value, broadcast, is_whole
from fusec.ir.index import Index, index
from fusec.ir.strides import contiguous_strides

aten = torch.ops.aten
IntoSize: TypeAlias = "int | Index"


def wrap(dim: int, rank: int) -> int:
    """Return a dimension counted from the front, given one that may count from the end."""
    return dim + rank if dim < 0 else dim


def from_end(position: IntoSize, extent: Index) -> Index:
    """Return a position that may count from the end as one that counts from the front."""
    at = index(position)
    return at + extent if at.hint() < 0 else at


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
    shape = call.out.shape
    whole = x.reshape_of or x
    if whole.shape == shape:
        return whole
    made = call.view(whole, lambda at: reshape_indices(whole.shape, shape, at))
    return replace(made, reshape_of=whole)


def reshape_indices(old: Indices, new: Indices, at: Indices) -> Indices:
    """Return the indices into ``old`` of the element at ``at`` of ``new``, both row-major."""
    result = [ZERO] * len(old)
    for sources, targets in groups(old, new):
        linear = linearise(tuple(at[k] for k in targets), tuple(new[k] for k in targets))
        digits = delinearise(linear, tuple(old[k] for k in sources))
        for source, digit in zip(sources, digits, strict=True):
            result[source] = digit
    return tuple(result)


def linearise(at: Indices, shape: Indices) -> Index:
    """Return the row-major number of the element of ``shape`` at some indices."""
    return strided(at, contiguous_strides(shape))


def strided(at: Indices, strides: Indices) -> Index:
    return sum((i * step for i, step in zip(at, strides, strict=True)), ZERO)


def delinearise(linear: Index, shape: Indices) -> Indices:
    """Return the row-major indices into ``shape`` of the element number ``linear``."""
    digits = [linear // step for step in contiguous_strides(shape)]
    return tuple(
        ZERO if extent is ONE else digit % extent if k else digit
        for k, (digit, extent) in enumerate(zip(digits, shape, strict=True))
    )


def groups(old: Indices, new: Indices) -> Iterator[tuple[list[int], list[int]]]:
    """Pair up the axes of two shapes of equal size in the smallest groups of equal size.

    Symbolic sizes are compared structurally; hints decide only which side's group grows next.
    """
    left = [k for k, extent in enumerate(old) if extent is not ONE]
    right = [k for k, extent in enumerate(new) if extent is not ONE]
    while left and right:
        sources, targets = [left.pop(0)], [right.pop(0)]
        old_size, new_size = old[sources[0]], new[targets[0]]
        while old_size is not new_size and (left or right):
            if left and (old_size.hint() <= new_size.hint() or not right):
                sources.append(left.pop(0))
                old_size = old_size * old[sources[-1]]
            else:
                targets.append(right.pop(0))
                new_size = new_size * new[targets[-1]]
        yield sources, targets
    if left or right:
        raise Unsupported("a reshape of symbolic sizes that do not compare")


# -- permutations and expansions ------------------------------------------------------------------


@lowers(aten.permute.default)
def permute(call: AtenCall, x: Value, dims: Sequence[int]) -> Value:
    order = [wrap(d, len(x.shape)) for d in dims]

    def where(at: Indices) -> Indices:
        return tuple(at[order.index(k)] for k in range(len(order)))

    return call.view(x, where)


@lowers(aten.expand.default)
def expand(call: AtenCall, x: Value, *_: Any, **__: Any) -> Value:
    return call.view(x, lambda at: broadcast(at, x.shape))


@lowers(
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.lift.default,
)
def alias(call: AtenCall, x: Value, *_: Any, **__: Any) -> Value:
    return x


# -- windows --------------------------------------------------------------------------------------


@lowers(aten.slice.Tensor)
def slice_tensor(
    call: AtenCall,
    x: Value,
    dim: int = 0,
    start: IntoSize | None = None,
    end: IntoSize | None = None,
    step: IntoSize = 1,
) -> Value:
    axis = wrap(dim, len(x.shape))
    first = slice_start(call, start, x.shape[axis])
    return call.view(x, lambda at: replaced(at, axis, first + at[axis] * index(step)))


def slice_start(call: AtenCall, start: IntoSize | None, extent: Index) -> Index:
    """Return the start of a slice, counted from the front of the sliced axis."""
    first = from_end(0 if start is None else start, extent)
    if first.is_constant and extent.is_constant:
        return index(min(max(first.const, 0), extent.const))
    sizes = call.lines.sizes
    if sizes.were_seen(first) and sizes.were_seen(extent):
        return ZERO if first.hint() < 0 else first
    return sizes.least(sizes.greatest(ZERO, first), extent)


def replaced(at: Indices, axis: int, position: Index) -> Indices:
    """Return indices with the one of ``axis`` replaced."""
    return (*at[:axis], position, *at[axis + 1 :])


@lowers(aten.select.int)
def select(call: AtenCall, x: Value, dim: int, position: IntoSize) -> Value:
    axis = wrap(dim, len(x.shape))
    chosen = from_end(position, x.shape[axis])
    return call.view(x, lambda at: (*at[:axis], chosen, *at[axis:]))


@lowers(aten.split_with_sizes.default, aten.split.Tensor)
def split(call: AtenCall, x: Value, _: Any, dim: int = 0) -> tuple[Value, ...]:
    axis = wrap(dim, len(x.shape))
    parts: list[Value] = []
    start = ZERO
    for k, kind in enumerate(call.results):
        parts.append(_window(call, x, axis, start, k))
        start = start + kind.shape[axis]
    return tuple(parts)


def _window(call: AtenCall, x: Value, axis: int, start: Index, result: int) -> Value:
    return call.view(x, lambda at: replaced(at, axis, start + at[axis]), result)


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
    return call.view(x, lambda at: diagonal_indices(at, len(x.shape), offset, dim1, dim2))


def diagonal_indices(at: Indices, rank: int, offset: int, dim1: int, dim2: int) -> Indices:
    """Return the indices of a diagonal's element, whose position on it is the last of ``at``."""
    row, column = wrap(dim1, rank), wrap(dim2, rank)
    rest = iter(at[:-1])
    place = {row: at[-1] + max(-offset, 0), column: at[-1] + max(offset, 0)}
    return tuple(place[k] if k in place else next(rest) for k in range(rank))


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
