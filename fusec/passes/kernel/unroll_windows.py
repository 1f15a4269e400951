"""Unroll neighbouring results of sums over windows, which read the same elements (CPU).

Spec: ``flat kernel, machine -> flat kernel``, the same values. Neighbouring windows overlap, and a
depthwise convolution has the same weights in each. So one grid point computes some neighbours, each
sum with its own accumulator, and the elements along the axis that they share are written out: each
is loaded once, and the weights stay in registers.

Worked example, three places, stride 1, four neighbours::

    y[w, c] = sum(h, k: x[h, w + k, c] * f[h, k, c])        grid w:28 c:96  inside h:3 k:3
    y[4*w, c] = sum(h: x[h, 4*w, c] * f[h, 0, c] + x[h, 4*w + 1, c] * f[h, 1, c] + ...);
    y[4*w + 1, c] = sum(h: x[h, 4*w + 1, c] * f[h, 0, c] + ...);  ...    grid w:7 c:96  inside h:3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.ir.contraction import is_product
from fusec.ir.expr import Load, Reduce, reductions
from fusec.ir.graph import FlatKernel
from fusec.ir.index import Axis, Index, floordiv, index
from fusec.ir.machine import Machine
from fusec.ir.monoid import SUM
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.unroll import added_up, placed, points, unrolled


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlapping windows of a kernel.

    Attributes:
        along: the axis of neighbouring windows, of the grid or of sums of all of them.
        places: the axis of the sums that walks through a window in the same direction.
        count: how many neighbours a grid point computes.
    """

    along: Axis
    places: Axis
    count: int


def unroll_windows(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return a kernel of sums over windows with neighbours unrolled into stores, else unchanged."""
    overlap = _find(kernel, machine)
    if overlap is None:
        return kernel
    along, places, count = overlap.along, overlap.places, index(overlap.count)
    fewer, simplify = Axis(along.name, floordiv(along.extent, count)), simplifier()
    neighbours = [{along: index(fewer) * count + n} for n in range(overlap.count)]
    terms = {places: ([*points((places,))], ()), along: (neighbours, (fewer,))}
    summed = added_up(kernel, terms)
    stores = [
        placed(store, at, simplify)
        for at in neighbours
        for store in summed.stores
        if along in store.indices[0].axes or at is neighbours[0]
    ]
    return unrolled(kernel, {along: (fewer,), places: ()}, stores)


def _find(kernel: FlatKernel, machine: Machine) -> Overlap | None:
    """Return the overlap of a kernel's windows whose elements are vectors of lanes, or None."""
    sums, loads = kernel.reductions, kernel.loads
    if any(n.monoid is not SUM or not n.dtype.is_float for n in sums) or any(
        a.limit is not None for a in kernel.axes
    ):
        return None
    lane = _lane(kernel, loads, machine)
    if lane is None or any(n.gathers for n in loads):
        return None
    found = {
        (along, places): step
        for load in loads
        for along in kernel.axes
        for places in kernel.inside
        if along is not lane and (step := _step(load.indices[0], along, places))
    }
    for along, places in sorted(found, key=lambda pair: found[pair]):
        count = _count(along, machine.loops.neighbours)
        if count and _is_window(along, places, sums, machine.loops.places):
            return Overlap(along, places, count)
    return None


def _is_window(along: Axis, places: Axis, sums: Sequence[Reduce], most: int) -> bool:
    """Return True if the sums along some places are over one small window, perhaps with channels.

    They sum no other sums, and others are no products, whose tiles have schedules of their own.
    """
    found = [n for n in sums if places in n.over]
    windows = {n.over for n in found}
    if len(windows) != 1 or any(reductions(n.body) for n in found):
        return False
    if any(is_product(n) for n in sums if places not in n.over):
        return False
    (window,) = windows
    small = all(a.extent.is_constant and a.extent.const <= most for a in window)
    return small and len(window) in (2, 3) and along not in window


def _lane(kernel: FlatKernel, loads: Sequence[Load], machine: Machine) -> Axis | None:
    """Return the axis that fills vectors, contiguous or constant in all memory, or None."""
    stored = [store.indices[0] for store in kernel.stores]
    for axis in kernel.axes:
        steps = {load.indices[0].coefficient(axis) for load in loads}
        wide = axis.extent.hint() >= machine.vector // 2
        if wide and steps <= {index(0), index(1)} and all(o.steps_by_one(axis) for o in stored):
            return axis
    return None


def _step(offset: Index, along: Axis, places: Axis) -> int:
    """Return the elements from a window to its neighbour if they share places, else 0."""
    step, place = offset.coefficient(along), offset.coefficient(places)
    if step is None or place is None or not (step.is_constant and place.is_constant):
        return 0
    shares = 0 < step.const < place.const * places.extent.const and step.const % place.const == 0
    return step.const if shares else 0


def _count(along: Axis, offered: tuple[int, ...]) -> int:
    """Return how many neighbours divide an axis, the best first; 0 if none does."""
    if not along.extent.is_constant:
        return 0
    return next((n for n in offered if along.extent.const % n == 0), 0)
