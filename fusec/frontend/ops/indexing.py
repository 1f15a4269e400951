"""Gathers, and tensors assembled from parts: cat, pad, slice_scatter, roll.

A gather reads an index from memory: ``Runtime(expr, extent)``. A part that covers only some
indices is a ``Select`` over loads guarded by the same condition, so that nothing is read outside.

Worked example, ``cat([a, b])`` of 3 and 5 elements::

    cat[i0] = where(i0 < 3, a[i0] if i0 < 3, b[i0 - 3] if i0 >= 3)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices, Scalar, read
from fusec.frontend.ops.arithmetic import less, select
from fusec.frontend.ops.registry import aten, defines, lowers
from fusec.frontend.ops.views import (
    IntoSize,
    delinearise,
    linearise,
    replaced,
    wrap,
)
from fusec.frontend.shapes import from_end
from fusec.frontend.value import ONE, ZERO, Value, broadcast
from fusec.ir.dtype import BOOL, I64, DType, compute_type
from fusec.ir.expr import Expr, IndexValue, as_value, both, cast, in_range, index_of, op, read_index
from fusec.ir.index import Index, index, is_in_range, is_nonnegative, product
from fusec.ir.rewrite import read_at

MASK = "a mask as an index: its result's size depends on data"

# -- gathers --------------------------------------------------------------------------------------


def gathered(indices: Value, at: Indices, extent: Index, *, wraps: bool) -> Index:
    """Return the index stored at ``at``; if ``wraps``, a negative one counts from the end."""
    if indices.dtype is BOOL or indices.dtype.is_float:
        raise Unsupported(MASK)
    value = cast(indices.at(at), I64)
    if wraps:
        value = counted_from_front(value, extent)
    return read_index(value, extent)


def fetched(x: Value, where: Indices) -> Expr:
    """Return an element of a tensor at indices some of which are read from memory."""
    return read_at(x.at(where), where)


def counted_from_front(value: Expr, extent: Index) -> Expr:
    """Return an index counted from the front, given one that counts from the end if negative."""
    value = cast(value, I64)
    known = index_of(value)
    if known is not None and is_nonnegative(known):
        return value
    if known is not None and is_nonnegative(-known - 1):
        return as_value(known + extent)
    return select(less(value, 0), value + as_value(extent), value)


@lowers(aten.index_select.default)
def index_select(call: AtenCall, x: Value, dim: int, indices: Value) -> Value:
    return selected(call, x, dim, indices, lambda at, axis: (at[axis],) if indices.shape else ())


@lowers(aten.gather.default)
def gather(call: AtenCall, x: Value, dim: int, indices: Value, **_: Any) -> Value:
    return selected(call, x, dim, indices, lambda at, axis: at if indices.shape else ())


def selected(
    call: AtenCall, x: Value, dim: int, indices: Value, place: Callable[[Indices, int], Indices]
) -> Value:
    """Emit elements at indices along an axis; a tensor without axes is one of one element.

    Args:
        place: returns where the index of an element of the result is, given the axis.
    """

    def body(at: Indices) -> Expr:
        if not x.shape:
            own = at if indices.shape == call.out.shape else (ZERO,) * len(indices.shape)
            only = checked(call, cast(indices.at(own), I64), ONE)
            return select(op("eq", only, 0), x.at(()), 0)
        axis = wrap(dim, len(x.shape))
        row = gathered(indices, place(at, axis), x.shape[axis], wraps=False)
        return fetched(x, replaced(at, axis, row) if at else (row,))

    return call.define(body)


@defines(aten.take.default)
def take(call: AtenCall, at: Indices, x: Value, indices: Value) -> Expr:
    """Return the elements of the flattened tensor at ``indices``."""
    count = product(x.shape)
    place = gathered(indices, at, count, wraps=True)
    return read_at(x.at(delinearise(place, x.shape)), (place,))


@defines(aten.index.Tensor)
def index_tensor(call: AtenCall, at: Indices, x: Value, indices: Sequence[Value | None]) -> Expr:
    """Return advanced indexing: axes of adjacent index tensors stay in place, others come first."""
    if any(i is not None and i.dtype is BOOL for i in indices):
        raise Unsupported(MASK)
    used = [k for k, i in enumerate(indices) if i is not None]
    rank = max((len(i.shape) for i in indices if i is not None), default=0)
    adjacent = used == list(range(used[0], used[0] + len(used))) if used else True
    first = used[0] if used and adjacent else 0
    shared = at[first : first + rank]
    rest = iter((*at[:first], *at[first + rank :]))
    where: list[Index] = []
    for k, extent in enumerate(x.shape):
        tensor = indices[k] if k < len(indices) else None
        if tensor is None:
            where.append(next(rest))
        else:
            place = broadcast(shared, tensor.shape)
            where.append(gathered(tensor, place, extent, wraps=True))
    return fetched(x, tuple(where))


def checked(call: AtenCall, place: Expr, extent: Index) -> Expr:
    """Return an index with the range check that eager has on CPUs, unless provably in range."""
    known = index_of(place)
    if not call.is_cpu or (known is not None and is_in_range(known, extent)):
        return place
    return op("within", place, as_value(extent))


# -- tensors from parts ---------------------------------------------------------------------------


@defines(aten.cat.default)
def cat(call: AtenCall, at: Indices, tensors: Sequence[Value], dim: int = 0) -> Expr:
    parts = [t for t in tensors if ZERO not in t.shape]
    if not parts:
        raise Unsupported("an empty tensor")
    axis = wrap(dim, len(call.out.shape))
    position, start = at[axis], ZERO
    found: list[tuple[Index, Expr]] = []
    for k, part in enumerate(parts):
        end = start + part.shape[axis]
        last = k == len(parts) - 1
        inside = in_range(position, start if k else None, None if last else end)
        element = part.at(replaced(at, axis, position - start), inside)
        found.append((end, converted(element, call.out.dtype)))
        start = end
    *before, (_, result) = found
    for end, element in reversed(before):
        result = select(op("lt", IndexValue(position), IndexValue(end)), element, result)
    return result


def converted(element: Expr, kind: DType) -> Expr:
    """Return an element converted to ``kind`` by way of its compute type."""
    return element if element.dtype is kind else cast(cast(element, compute_type(kind)), kind)


@defines(aten.constant_pad_nd.default)
def constant_pad(
    call: AtenCall, at: Indices, x: Value, pad: Sequence[IntoSize], value: Scalar = 0
) -> Expr:
    rank, kind = len(x.shape), call.out.dtype
    before = [ZERO] * rank
    for k in range(len(pad) // 2):
        before[rank - 1 - k] = index(pad[2 * k])
    where = tuple(i - start for i, start in zip(at, before, strict=True))
    guard: Expr | None = None
    for i, extent in zip(where, x.shape, strict=True):
        guard = both(guard, in_range(i, 0, extent))
    inside = x.at(where, guard)
    if guard is None:
        return inside
    return select(guard, inside, cast(read(value, (), compute_type(kind)), kind))


_Around: TypeAlias = Callable[[Index, Index], tuple[Index, Index]]


def pad_by_inside(around: _Around, call: AtenCall, x: Value, pad: Sequence[IntoSize]) -> Value:
    """Emit a pad of the last axes with elements of ``x``: a selection of before, within and after.

    Args:
        around: from an index and the last valid one, returns the index to read where the first is
            before the tensor, and the one where it is after.
    """
    padded = tuple(len(x.shape) - 1 - k for k in range(len(pad) // 2))

    def inside(at: Indices, guard: Expr | None, axes: tuple[int, ...]) -> Expr:
        if not axes:
            return x.at(at, guard)
        axis, *left = axes
        place, extent = at[axis], x.shape[axis]
        low, high = around(place, extent - 1)

        def part(where: Index, condition: Expr | None) -> Expr:
            return inside(replaced(at, axis, where), both(guard, condition), tuple(left))

        value = part(place, in_range(place, ZERO, extent))
        for where, condition in ((low, -place - 1), (high, place - extent)):
            if not is_nonnegative(-condition - 1):
                there = op("ge", IndexValue(condition), IndexValue(ZERO))
                value = select(there, part(where, there), value)
        return value

    def body(at: Indices) -> Expr:
        where = list(at)
        for k, axis in enumerate(padded):
            where[axis] = at[axis] - index(pad[2 * k])
        return inside(tuple(where), None, padded)

    return call.define(body)


_PADS: dict[str, _Around] = {
    "reflection": lambda i, last: (-i, 2 * last - i),
    "replication": lambda i, last: (ZERO, last),
}
for _kind, _around in _PADS.items():
    _targets = [getattr(aten, f"{_kind}_pad{rank}d").default for rank in (1, 2, 3)]
    # A library copies rows, which is faster: these are for targets without one.
    lowers(*_targets, alone=True)(partial(pad_by_inside, _around))


@defines(aten.repeat.default)
def repeat(call: AtenCall, at: Indices, x: Value, repeats: Sequence[IntoSize]) -> Expr:
    aligned = zip(at[len(at) - len(x.shape) :], x.shape, strict=True)
    return x.at(tuple(ZERO if extent is ONE else i % extent for i, extent in aligned))


@defines(aten.roll.default)
def roll(
    call: AtenCall, at: Indices, x: Value, shifts: Sequence[IntoSize], dims: Sequence[int] = ()
) -> Expr:
    """Return a roll along some axes, or of the flattened tensor."""
    shift_of: dict[int, Index] = {}
    for d, shift in zip(dims, shifts, strict=bool(dims)):
        axis = wrap(d, len(x.shape))
        shift_of[axis] = shift_of.get(axis, ZERO) + index(shift)

    def rolled(i: Index, extent: Index, shift: Index) -> Index:
        return (i + (extent - shift) % extent) % extent

    if not dims:
        place = rolled(linearise(at, x.shape), product(x.shape), index(shifts[0]))
        return x.at(delinearise(place, x.shape))
    pairs = enumerate(zip(at, x.shape, strict=True))
    return x.at(tuple(rolled(i, e, shift_of[k]) if k in shift_of else i for k, (i, e) in pairs))


# -- windows replaced -----------------------------------------------------------------------------


def require_shape(source: Value, shape: Indices) -> None:
    """Leave a source of another shape than the window that it replaces to eager, which refuses it.

    Raises:
        Unsupported: if one of its extents is not known to be the same.
    """
    if source.shape != shape:
        raise Unsupported("a source of another shape than what it replaces")


def slice_end(call: AtenCall, end: IntoSize | None, extent: Index) -> Index:
    """Return the end of a slice, counted from the front of the sliced axis.

    A number is compared with the extent by what is known of it: no guard need hold of the two.
    """
    last = from_end(sys.maxsize if end is None else end, extent)
    sizes = call.lines.sizes
    if last is index(sys.maxsize):
        return extent
    if last.is_constant or not (sizes.were_seen(last) and sizes.were_seen(extent)):
        return sizes.least(sizes.greatest(ZERO, last), extent)
    return extent if last.hint() > extent.hint() else last


@defines(aten.slice_scatter.default)
def slice_scatter(
    call: AtenCall,
    at: Indices,
    x: Value,
    source: Value,
    dim: int = 0,
    start: IntoSize | None = None,
    end: IntoSize | None = None,
    step: IntoSize = 1,
) -> Expr:
    axis = wrap(dim, len(x.shape))
    first = call.lines.sizes.slice_start(start, x.shape[axis])
    stride = index(step)
    rows = (slice_end(call, end, x.shape[axis]) - first + (stride - 1)) // stride
    require_shape(source, replaced(x.shape, axis, rows))
    distance = at[axis] - first
    inside = in_range(distance, 0, (source.shape[axis] - 1) * stride + 1)
    if stride is not ONE:
        on_grid = op("eq", IndexValue(distance % stride), IndexValue(ZERO))
        inside = both(inside, on_grid)
    where = replaced(at, axis, distance // stride)
    new = converted(source.at(where, inside), x.dtype)
    return new if inside is None else select(inside, new, x.at(at))


@defines(aten.select_scatter.default)
def select_scatter(
    call: AtenCall, at: Indices, x: Value, source: Value, dim: int, position: IntoSize
) -> Expr:
    axis = wrap(dim, len(x.shape))
    require_shape(source, (*x.shape[:axis], *x.shape[axis + 1 :]))
    chosen = from_end(position, x.shape[axis])
    hit = op("eq", IndexValue(at[axis]), checked(call, IndexValue(chosen), x.shape[axis]))
    new = converted(source.at((*at[:axis], *at[axis + 1 :])), x.dtype)
    return select(hit, new, x.at(at))


@defines(aten.diagonal_scatter.default)
def diagonal_scatter(
    call: AtenCall,
    at: Indices,
    x: Value,
    source: Value,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Expr:
    rank = len(x.shape)
    row, column = wrap(dim1, rank), wrap(dim2, rank)
    along = at[row] - max(-offset, 0)
    ends = x.shape[row] - max(-offset, 0), x.shape[column] - max(offset, 0)
    length = call.lines.sizes.least(*ends)
    others = (extent for k, extent in enumerate(x.shape) if k not in (row, column))
    require_shape(source, (*others, length))
    hit = op("eq", IndexValue(at[column] - at[row]), IndexValue(index(offset)))
    guard = both(in_range(along, 0, source.shape[-1]), hit)
    rest = tuple(i for k, i in enumerate(at) if k not in (row, column))
    new = converted(source.at((*rest, along), guard), x.dtype)
    return select(hit, new, x.at(at))
