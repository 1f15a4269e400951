"""Compute one place of each equal part of an axis at a time, where comparisons tell parts apart.

Spec: ``flat kernel, machine -> flat kernel``, the same values. Which part an element is in is a
chain of comparisons with its position. A point of the grid, or of the lanes that sums run along,
computes one place of each part instead,

* on CPUs where parts are many: a stack of the steps of a recurrence would compare each element with
  each step;
* on GPUs where parts read the same elements, which are then loaded once;
* on GPUs where a row that is summed in registers is no power of two, so that lanes would be idle,
  or so long that its temporary values would not fit: those of one part do.

Worked examples, a stack of the results of eight steps, and a rotary embedding::

    y[t, i] = where(t < 1, a[i], where(t < 2, b[i], ...))        grid t:8 i:256
    y[0, i] = a[i];  y[1, i] = b[i];  ...                        grid i:256

    y[d] = x[d] * c[d] + where(d < 64, -x[d + 64], x[d - 64]) * s[d]                  grid d:128
    y[d] = x[d] * c[d] - x[d + 64] * s[d];  y[d + 64] = x[d + 64] * c[d + 64] + ...   grid d:64
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from fusec.ir.contraction import factors
from fusec.ir.expr import Expr, IndexValue, Load, Op, Reduce, Select, children, reach, substitute
from fusec.ir.graph import FlatKernel, Store, kernel_nodes
from fusec.ir.index import Axis, index
from fusec.ir.machine import Machine, RowTuning
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import rewrite
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.unroll_windows import added_up
from fusec.passes.schedule.access import VECTOR_BYTES, fastest_axis, limiting_axes
from fusec.passes.schedule.rowwise import column_sums, is_resident

Stores: TypeAlias = tuple[tuple[Store, ...], ...]
"""The stores of each part."""


def unroll_parts(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return the kernel with a store for each of some equal parts of an axis, else unchanged."""
    if not machine.is_cpu and (row := _cut_row(kernel, machine.rows)) is not None:
        axis, place, starts = row
        return _joined(kernel, axis, place, _by_parts(kernel, axis, place, starts))
    for axis, ends in _ends(kernel).items():
        if axis.limit is not None or axis in limiting_axes(kernel):
            continue
        length = math.gcd(axis.extent.const, *ends)
        place, starts = Axis(axis.name, index(length)), range(0, axis.extent.const, length)
        if machine.is_cpu:
            unrolls = len(starts) <= len(ends) + 1 and _has_many(kernel, axis, length, machine)
        else:
            unrolls = 1 < len(starts) <= machine.rows.parts and _fills_vectors(kernel, length)
        if not unrolls:
            continue
        parts = _by_parts(kernel, axis, place, starts)
        if machine.is_cpu or _share_loads(parts, place):
            return _joined(kernel, axis, place, parts)
    return kernel


def _cut_row(kernel: FlatKernel, tuning: RowTuning) -> tuple[Axis, Axis, range] | None:
    """Return the axis of rows that stay in registers, a part of it, and where parts begin.

    None where whole rows are as good.
    """
    row = fastest_axis(kernel, kernel.axes)
    if row not in kernel.inside or row is None or not is_resident(row, tuning):
        return None
    extent = row.extent.const
    length = extent & -extent
    if length == extent and column_sums(kernel, row):
        length = min(extent, tuning.part_row)
    summed = column_sums(kernel, row) > 0 and extent > tuning.warp_row
    least = tuning.warp_row if summed else tuning.least_part
    if length < least or not 1 < extent // length <= tuning.parts:
        return None
    if not _fills_vectors(kernel, length):
        return None
    return row, Axis(row.name, index(length)), range(0, extent, length)


def _has_many(kernel: FlatKernel, axis: Axis, length: int, machine: Machine) -> bool:
    """Return True for a pointwise kernel with so many parts that a CPU should not compare."""
    whole = all(s.indices[0].coefficient(axis) is not index(0) for s in kernel.stores)
    lanes = any(s.indices[0].steps_by_one(axis) for s in kernel.stores)
    wide = length >= machine.vector if lanes else True
    many = machine.loops.least_parts * length <= axis.extent.const
    return not kernel.inside and whole and wide and many


def _fills_vectors(kernel: FlatKernel, length: int) -> bool:
    """Return True if parts are whole vectors in each tensor, in a kernel without products."""
    nodes = kernel_nodes(kernel)
    sums = [n for n in nodes if isinstance(n, Reduce)]
    if any(n.monoid is not SUM or factors(n) is not None for n in sums):
        return False
    return all(length * n.dtype.itemsize % VECTOR_BYTES == 0 for n in nodes if isinstance(n, Load))


def _ends(kernel: FlatKernel) -> dict[Axis, set[int]]:
    """Return axis -> the positions with which conditions compare it."""
    found: dict[Axis, set[int]] = {}
    for node in kernel_nodes(kernel):
        if isinstance(node, Select) and (compared := _compared(node.condition)) is not None:
            axis, end = compared
            if axis in kernel.axes and axis.extent.is_constant:
                found.setdefault(axis, set()).add(end)
    return found


def _compared(condition: Expr) -> tuple[Axis, int] | None:
    """Return i and n of a condition ``i < n``, else None."""
    match condition:
        case Op(name="lt", args=(IndexValue() as at, IndexValue() as end)):
            axis = at.index.as_axis()
            return (axis, end.index.const) if axis and end.index.is_constant else None
        case _:
            return None


def _taken(node: Expr, axis: Axis, start: int) -> Expr:
    """Return what the outermost conditions choose for a part: chains are long."""
    while isinstance(node, Select):
        compared = _compared(node.condition)
        if compared is None or compared[0] is not axis:
            break
        node = node.then if start < compared[1] else node.other
    return node


def _by_parts(kernel: FlatKernel, axis: Axis, place: Axis, starts: Sequence[int]) -> Stores:
    """Return the stores of each part, at a place in it; those without the axis are the first's."""
    simplify, only = simplifier(), place.extent is index(1)
    places = [{axis: index(start) if only else index(place) + start} for start in starts]

    def whole(node: Expr) -> Expr:
        return (
            added_up(node, axis, places, (place,))
            if isinstance(node, Reduce) and axis in node.over
            else node
        )

    roots = rewrite(tuple(store.expr for store in kernel.stores), whole)
    parts: list[tuple[Store, ...]] = []
    for start, at in zip(starts, places, strict=True):
        stores = []
        for store, root in zip(kernel.stores, roots, strict=True):
            if at is places[0] or axis in store.indices[0].axes:
                (expr,) = simplify((_taken(root, axis, start).substitute(at),))
                stores.append(Store(store.buffer, (substitute(store.indices[0], at),), expr))
        parts.append(tuple(stores))
    return tuple(parts)


def _share_loads(parts: Stores, place: Axis) -> bool:
    """Return True if parts read the same elements, beside sums that each of them needs whole."""

    def below(node: Expr) -> tuple[Expr, ...]:
        return () if isinstance(node, Reduce) and place in node.over else children(node)

    read = [
        {n for n in reach((s.expr for s in part), below) if isinstance(n, Load) and place in n.axes}
        for part in parts
    ]
    return sum(map(len, read)) > len(set().union(*read))


def _joined(kernel: FlatKernel, axis: Axis, place: Axis, parts: Stores) -> FlatKernel:
    """Return a kernel over the places of one part, with the stores of all."""
    new = () if place.extent is index(1) else (place,)
    grid, inside = (
        tuple(b for a in axes for b in (new if a is axis else (a,)))
        for axes in (kernel.grid, kernel.inside)
    )
    stores = tuple(store for part in parts for store in part)
    return FlatKernel(replace(kernel, grid=grid, inside=inside, stores=stores, labels=()))
