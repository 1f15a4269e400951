"""The elements of a buffer that a kernel touches, each once, at the hints of sizes.

An access touches no more elements than its indices have points, and none outside of the box that
its indices span. Several accesses touch no more than all of their points together, and none outside
of the union of their boxes; the account takes the less of these two. An index that is read from
memory spans its whole dimension. Expanded dimensions, of stride 0, have one element.

Where a load's guard compares indices, axes have only the positions that it allows. So have those of
loops of products whose terms count nowhere else, up to a tile: a causal attention of 200 queries
reads 200 keys, however many there are.

Worked example, halves that are read apart and together: ``x[i]``, i < 4, and ``x[j + 4]``, j < 4,
have 8 points in boxes [0, 4) and [4, 8): 8 elements. ``x[i]`` and ``x[i + 1]`` have 8 points, too,
in boxes [0, 4) and [1, 5): 5 elements. ``x[2*i]`` has 4 points in the box [0, 7): 4 elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import TypeAlias

from fusec.errors import InternalError
from fusec.ir.contraction import factors
from fusec.ir.edges import edges_of_terms, edges_when
from fusec.ir.expr import Buffer, Expr, Reduce
from fusec.ir.graph import Kernel
from fusec.ir.index import Atom, Axis, FloorDiv, Index, Mod, Runtime, Size, index

Span: TypeAlias = tuple[int, int]
"""The first position, and the one behind the last."""
Box: TypeAlias = tuple[Span, ...]
Limits: TypeAlias = tuple[tuple[Axis, Span], ...]
"""Axes that have only a part of their positions; others have all."""
Visit: TypeAlias = tuple[tuple[Index, ...], Limits]
"""The indices of an access, and where it happens."""


def kernel_traffic(kernel: Kernel) -> dict[Buffer, tuple[int, int]]:
    """Return buffer -> (bytes read, bytes written), each element counted once."""
    looped = _of_loops(kernel.reductions)
    read: dict[Buffer, dict[Visit, None]] = {}
    written: dict[Buffer, dict[Visit, None]] = {}
    for load in kernel.loads:
        own = tuple((axis, span) for axis, span in looped if axis in load.axes)
        limits = own if load.guard is None else _guarded(load.guard, own)
        read.setdefault(load.buffer, {})[load.indices, limits] = None
    for store in kernel.stores:
        written.setdefault(store.buffer, {})[store.indices, ()] = None
        if store.adds:
            read.setdefault(store.buffer, {})[store.indices, ()] = None
    buffers = dict.fromkeys((*read, *written))
    return {b: (_touched(b, read.get(b, {})), _touched(b, written.get(b, {}))) for b in buffers}


def _touched(buffer: Buffer, places: Iterable[Visit]) -> int:
    """Return the bytes of a buffer that accesses touch."""
    return _elements(buffer, tuple(places)) * buffer.dtype.itemsize


def _of_loops(sums: Sequence[Reduce]) -> Limits:
    """Return the reduced axes that a kernel of products walks in part, for all of its terms."""
    if not any(factors(node) is not None for node in sums):
        return ()
    limits: Limits = ()
    for axis in dict.fromkeys(a for node in sums for a in node.over):
        edges = edges_of_terms(node for node in sums if axis in node.over)
        limits += tuple(pair for pair in _narrowed(edges, ()) if pair[0] is axis)
    return limits


@functools.lru_cache(maxsize=1 << 12)
def _guarded(guard: Expr, limits: Limits) -> Limits:
    """Return the positions at which a condition may hold, of those within limits."""
    return _narrowed(edges_when(guard, True), limits)


def _narrowed(edges: Iterable[Index], limits: Limits) -> Limits:
    """Return limits within which each edge, an index, may be at most zero."""
    found = dict(limits)
    for edge in edges:
        for axis in sorted(edge.axes, key=lambda a: a.serial):
            step = edge.coefficient(axis)
            if step is None or not step.is_constant or step is index(0):
                continue
            rest = _range(edge - step * index(axis), found)
            if rest is None:
                continue
            first, last = found.get(axis, _whole(axis))
            if step.const > 0:  # step*axis <= -rest
                last = min(last, -rest[0] // step.const)
            else:
                first = max(first, -(rest[0] // step.const))  # axis >= rest / -step
            if (first, last) != _whole(axis):
                found[axis] = first, last
    return tuple(found.items())


def _whole(axis: Axis) -> Span:
    """Return the first and the last position along an axis."""
    return 0, max(0, axis.extent.hint() - 1)


@functools.lru_cache(maxsize=1 << 14)
def _elements(buffer: Buffer, places: tuple[Visit, ...]) -> int:
    """Return the elements at some places of a buffer."""
    zero = index(0)
    dims = [d for d, stride in enumerate(buffer.strides) if stride is not zero]
    points, boxes = 0, set()
    for place, pairs in places:
        limits = dict(pairs)
        axes = {axis for d in dims for axis in place[d].axes}
        spans = [limits.get(axis, (0, axis.extent.hint() - 1)) for axis in axes]
        points += math.prod(max(0, last + 1 - first) for first, last in spans)
        boxes.add(tuple(_inside(buffer.shape[d].hint(), place[d], limits) for d in dims))
    return min(points, _volume(frozenset(boxes)))


def _volume(boxes: frozenset[Box]) -> int:
    """Return the number of positions in any of some boxes: in slabs along the first dimension."""
    if not boxes or () in boxes:
        return len(boxes)
    cuts = sorted({edge for (span, *_) in boxes for edge in span})
    return sum(
        (end - start) * _volume(frozenset(b[1:] for b in boxes if b[0][0] <= start < b[0][1]))
        for start, end in pairwise(cuts)
    )


def _inside(extent: int, place: Index, limits: Mapping[Axis, Span]) -> Span:
    """Return the positions of a dimension that an index may have."""
    found = _range(place, limits)
    return (0, extent) if found is None else (max(0, found[0]), max(0, min(extent, found[1] + 1)))


def _range(value: Index, limits: Mapping[Axis, Span]) -> Span | None:
    """Return the least and the greatest value of an index; None if it is read from memory."""
    low = high = value.const
    for monomial, coefficient in value.terms:
        ranges = [_range_of(atom, limits) for atom in monomial]
        known = [r for r in ranges if r is not None]
        if len(known) < len(ranges):
            return None
        values = [coefficient * math.prod(corner) for corner in product(*known)]
        low, high = low + min(values), high + max(values)
    return low, high


def _range_of(atom: Atom, limits: Mapping[Axis, Span]) -> Span | None:
    match atom:
        case Axis():
            return limits.get(atom, _whole(atom))
        case Size():
            return atom.hint, atom.hint
        case FloorDiv() | Mod():
            inside, divisor = _range(atom.dividend, limits), max(1, atom.divisor.hint())
            if inside is None:
                return None
            low, high = (end // divisor for end in inside)
            if isinstance(atom, FloorDiv):
                return low, high
            first, last = (end % divisor for end in inside)
            return (first, last) if low == high else (0, divisor - 1)
        case Runtime():
            return None
        case _:
            raise InternalError(atom, stage="fusion")
