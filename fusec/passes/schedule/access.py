"""Strides of a kernel's accesses along each axis, by which schedules are chosen."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

from fusec.ir.buffer import Buffer
from fusec.ir.expr import Load, index_exprs
from fusec.ir.graph import FlatKernel, Kernel, Store
from fusec.ir.index import Axis, Index, index, product
from fusec.passes.schedule.descriptors import is_multiple

VECTOR_BYTES = 16
"""Widest load of one thread of a GPU."""
LINE_BYTES = 128
"""A line of a GPU's cache."""


@dataclass(frozen=True, slots=True)
class Access:
    """One load or store: offset in elements, bytes of an element, accessed elements."""

    offset: Index
    itemsize: int
    points: int


def accesses(kernel: Kernel, besides: Buffer | None = None) -> list[Access]:
    """Return the loads and stores of a kernel, each once, but for those of a buffer."""
    places: list[Load | Store] = [*kernel.stores, *kernel.loads]
    places = [place for place in places if place.buffer is not besides]
    pairs = [(place.buffer.offset(place.indices), place.buffer.dtype) for place in places]
    return [Access(offset, dtype.itemsize, count(offset.axes)) for offset, dtype in pairs]


@functools.lru_cache(maxsize=1 << 14)
def count(axes: frozenset[Axis] | tuple[Axis, ...]) -> int:
    """Return the product of the axes' extents, at the hints of their sizes."""
    return product(a.extent for a in axes).hint()


@functools.lru_cache(maxsize=1 << 14)
def _steps(offset: Index) -> tuple[tuple[Axis, int | None], ...]:
    """Return (axis, stride in elements at hints) for each axis; None for strides not affine."""
    found = ((axis, offset.coefficient(axis)) for axis in offset.axes)
    return tuple((axis, None if by is None else by.hint()) for axis, by in found)


def step(access: Access, axis: Axis) -> int | None:
    """Return the stride along an axis, in elements at hints; None if the offset is not affine."""
    coefficient = access.offset.coefficient(axis)
    return None if coefficient is None else coefficient.hint()


def is_transposed(load: Load, along: Axis, lane: Axis) -> bool:
    """Return True for a load that is contiguous along an axis, and strided along the lanes.

    Its guard, if any, does not vary along the contiguous axis.
    """
    offset = load.buffer.offset(load.indices)
    step = offset.coefficient(lane)
    if step is None or step.axes or step is index(0) or step is index(1):
        return False
    if any(True for _ in index_exprs(offset)) or offset.coefficient(along) is not index(1):
        return False
    return load.guard is None or along not in load.guard.axes


def vector_along(load: Load, axis: Axis) -> int:
    """Return how many elements, of at most 16 bytes, one access may load along an axis."""
    width = VECTOR_BYTES // load.dtype.itemsize
    begin = load.buffer.offset(load.indices) - index(axis)
    while not is_multiple(begin, width):
        width //= 2
    return width


def limiting_axes(kernel: Kernel) -> frozenset[Axis]:
    """Return the axes in limits of ragged axes: as lanes, they would have different trip counts."""
    return frozenset(b for a in kernel.axes if a.limit is not None for b in a.limit.axes)


def offsets_with_neighbour(kernel: FlatKernel) -> frozenset[Index]:
    """Return the offsets of loads, and of stores, whose neighbour in memory is accessed as well."""
    loads = {(n.buffer, n.indices[0]) for n in kernel.loads}
    stores = {(store.buffer, store.indices[0]) for store in kernel.stores}
    found: set[Index] = set()
    for places in (loads, stores):
        for buffer, offset in places:
            if (buffer, offset + 1) in places:
                found.update((offset, offset + 1))
    return frozenset(found)


def fastest_axis(
    kernel: Kernel,
    candidates: tuple[Axis, ...],
    paired: Collection[Index] = (),
    besides: Buffer | None = None,
) -> Axis | None:
    """Return the axis along which most traffic is contiguous, or None where no access is.

    Each access votes with its bytes: for an axis of unit stride, in either direction, against one
    of another stride; an access that does not vary along the axis is a broadcast and has no vote.

    Args:
        paired: offsets of halves of pairs, for which a stride of two is contiguous.
        besides: a buffer whose accesses do not vote.
    """
    scores: dict[Axis, int] = {}
    contiguous: set[Axis] = set()
    for access in accesses(kernel, besides):
        weight = access.points * access.itemsize
        units = (1, 2) if access.offset in paired else (1, -1)
        for axis, by in _steps(access.offset):
            if by in units:
                contiguous.add(axis)
            if by != 0:
                scores[axis] = scores.get(axis, 0) + (weight if by in units else -weight)
    ends = limiting_axes(kernel)
    able = [a for a in candidates if a in contiguous and a.limit is None and a not in ends]
    return max(reversed(able), key=scores.__getitem__, default=None)
