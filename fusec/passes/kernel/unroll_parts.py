"""Compute one place of each equal part of an axis at a time, where comparisons tell parts apart.

Spec: ``flat kernel, machine -> flat kernel``, the same values. Which part an element is in is a
chain of comparisons with its position. A point of the grid, or of the lanes that sums run along,
computes one place of each part instead,

* on CPUs where parts are many: a stack of the steps of a recurrence would compare each element with
  each step;
* on GPUs where parts read the same elements, which are then loaded once, and where parts are the
  elements of pairs, side by side in memory (``codegen/triton/pairs.py``);
* on GPUs where a row that is summed in registers is no power of two, so that lanes would be idle,
  or so long that its temporary values would not fit: those of one part do. Beside column sums the
  last part may be short: its loads, stores and terms have a guard.

Worked examples, a stack of the results of eight steps, and a rotary embedding::

    y[t, i] = where(t < 1, a[i], where(t < 2, b[i], ...))        grid t:8 i:256
    y[0, i] = a[i];  y[1, i] = b[i];  ...                        grid i:256

    y[d] = x[d] * c[d] + where(d < 64, -x[d + 64], x[d - 64]) * s[d]                  grid d:128
    y[d] = x[d] * c[d] - x[d + 64] * s[d];  y[d + 64] = x[d + 64] * c[d + 64] + ...   grid d:64
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from fusec.ir.contraction import factors
from fusec.ir.dtype import I32
from fusec.ir.expr import Expr, IndexValue, Load, Op, Reduce, Select, children, op, postorder, reach
from fusec.ir.graph import FlatKernel, Store, kernel_nodes
from fusec.ir.index import Axis, FloorDiv, Mod, floordiv, index, mod
from fusec.ir.machine import Machine
from fusec.ir.monoid import SUM
from fusec.ir.serial import serial_axes
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.unroll import Substitution, added_up, guarded, placed, unrolled
from fusec.passes.kernel.unroll_pairs import is_of_pairs
from fusec.passes.schedule.access import VECTOR_BYTES, count, fastest_axis, limiting_axes
from fusec.passes.schedule.pointwise import power_of_two
from fusec.passes.schedule.rowwise import column_sums, held_tiles, is_resident, vector_of

Stores: TypeAlias = tuple[tuple[Store, ...], ...]
"""The stores of each part."""


def unroll_parts(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return the kernel with a store for each of some equal parts of an axis, else unchanged."""
    if not machine.is_cpu and (pairs := _pairs(kernel)) is not None:
        axis, place, places = pairs
        apart = _joined(kernel, axis, place, _by_parts(kernel, axis, place, places))
        return _summed_by_pairs(apart)
    if not machine.is_cpu and (row := _cut_row(kernel, machine)) is not None:
        axis, place, starts = row
        places = _parts_of(axis, place, starts)
        return _joined(kernel, axis, place, _by_parts(kernel, axis, place, places))
    for axis, ends in _ends(kernel).items():
        serial = serial_axes(kernel_nodes(kernel))
        if axis.limit is not None or axis in limiting_axes(kernel) | serial:
            continue
        length = math.gcd(axis.extent.const, *ends)
        place, starts = Axis(axis.name, index(length)), range(0, axis.extent.const, length)
        if machine.is_cpu:
            unrolls = len(starts) <= len(ends) + 1 and _has_many(kernel, axis, length, machine)
        else:
            unrolls = 1 < len(starts) <= machine.rows.parts and _fills_vectors(kernel, length)
        if not unrolls:
            continue
        parts = _by_parts(kernel, axis, place, _parts_of(axis, place, starts))
        if machine.is_cpu or _share_loads(parts, place):
            return _joined(kernel, axis, place, parts)
    return kernel


def _cut_row(kernel: FlatKernel, machine: Machine) -> tuple[Axis, Axis, range] | None:
    """Return the axis of rows that stay in registers, a part of it, and where parts begin.

    None where whole rows are as good.
    """
    tuning = machine.rows
    row = fastest_axis(kernel, kernel.axes)
    if row not in kernel.inside or row is None or not is_resident(row, tuning):
        return None
    extent = row.extent.const
    if column_sums(kernel, row) and extent > tuning.warp_row:
        length = _part_beside_sums(kernel, row, machine)
        least, most = tuning.least_part, tuning.most_parts
    else:
        length, least, most = extent & -extent, tuning.least_part, tuning.parts
    if length < least or not 1 < -(-extent // length) <= most:
        return None
    if not _fills_vectors(kernel, length):
        return None
    return row, Axis(row.name, index(length)), range(0, extent, length)


def _part_beside_sums(kernel: FlatKernel, row: Axis, machine: Machine) -> int:
    """Return the elements of a part of a row beside column sums; the last part may be shorter.

    Of each part a thread has a vector. Parts of few warps need two programs a multiprocessor.
    """
    extent, tuning = row.extent.const, machine.rows
    exact = extent & -extent
    whole = min(exact, tuning.part_row) if exact == extent else exact
    vector = vector_of(kernel, row)
    each = vector * held_tiles(kernel, row)
    padded = power_of_two(extent)
    part = padded // tuning.most_parts
    if tuning.thread_parts * each > tuning.thread_values:
        return whole if whole >= tuning.warp_row else 0
    whole_fits = tuning.warp_row <= whole and extent <= tuning.parts * whole
    if whole_fits and tuning.most_parts * each <= tuning.thread_values:
        return whole
    parts, short = -(-extent // part), part < tuning.warp_row
    shared = count(kernel.grid) > machine.units and parts < tuning.most_parts
    if part >= tuning.packed_row or (parts <= tuning.thread_parts if short else shared):
        return part
    if short and extent <= padded - 2 * part:
        return 2 * part
    return whole if extent <= tuning.parts * whole else 0


def _has_many(kernel: FlatKernel, axis: Axis, length: int, machine: Machine) -> bool:
    """Return True for a pointwise kernel with so many parts that a CPU should not compare."""
    whole = all(s.indices[0].coefficient(axis) is not index(0) for s in kernel.stores)
    lanes = any(s.indices[0].steps_by_one(axis) for s in kernel.stores)
    wide = length >= machine.vector if lanes else True
    many = machine.loops.least_parts * length <= axis.extent.const
    return not kernel.inside and whole and wide and many


def _pairs(kernel: FlatKernel) -> tuple[Axis, Axis, Sequence[Substitution]] | None:
    """Return an axis of pairs that are stored side by side, a place, and both elements' indices.

    It is an axis of two, or a longer one that is halved: for even and odd elements that differ.
    """
    if not (_sums_only(kernel) and all(s.buffer.dtype.is_float for s in kernel.stores)):
        return None
    for axis in kernel.axes:
        if is_of_pairs(kernel, axis):
            return axis, Axis(axis.name, index(1)), [{axis: index(0)}, {axis: index(1)}]
    for axis in _halved(kernel):
        stored = [s.indices[0] for s in kernel.stores if axis in s.indices[0].axes]
        even = axis.limit is None and mod(axis.extent, index(2)) is index(0)
        if stored and even and all(offset.steps_by_one(axis) for offset in stored):
            place = Axis(axis.name, floordiv(axis.extent, index(2)))
            both = index(0) if place.extent is index(1) else index(place) * 2
            return axis, place, [{axis: both}, {axis: both + 1}]
    return None


def _halved(kernel: FlatKernel) -> Iterator[Axis]:
    """Yield the axes of quotients and remainders by two."""
    nodes = kernel_nodes(kernel)
    values = [n.index for n in nodes if isinstance(n, IndexValue)]
    values += [i for n in nodes if isinstance(n, Load) for i in n.indices]
    for atom in dict.fromkeys(atom for value in values for atom in value.atoms()):
        if isinstance(atom, FloorDiv | Mod) and atom.divisor is index(2):
            (*others, axis) = sorted(atom.dividend.axes, key=lambda a: a.serial) or (None,)
            if not others and axis in kernel.axes and atom.dividend.steps_by_one(axis):
                yield axis


def _summed_by_pairs(kernel: FlatKernel) -> FlatKernel:
    """Return the kernel with sums over whole rows of pairs as sums over pairs: they share loads.

    sum(r: x[r]) beside y[2*j] = ..., y[2*j + 1] = ...   is   sum(j: x[2*j] + x[2*j + 1])
    """
    offsets = [store.indices[0] for store in kernel.stores]
    stored = frozenset(axis for offset in offsets for axis in offset.axes)
    for along in [axis for axis in kernel.inside if axis.limit is None]:
        for row in [axis for axis in kernel.inside if axis not in stored and axis.limit is None]:
            paired = any(offset.coefficient(along) is index(2) for offset in offsets)
            if paired and row.extent is along.extent * 2 and _may_run(kernel, row, along):
                pair = [{row: index(along) * 2}, {row: index(along) * 2 + 1}]
                inside = tuple(axis for axis in kernel.inside if axis is not row)
                summed = replace(added_up(kernel, {row: (pair, (along,))}), inside=inside)
                kernel = FlatKernel(summed)
    return kernel


def _may_run(kernel: FlatKernel, row: Axis, along: Axis) -> bool:
    """Return True if sums over a row may run along another axis: none reads, or runs along, it."""
    return not any(
        row in bound and along in bound | node.axes
        for node in kernel.reductions
        for bound in [{a for n in postorder((node,)) if isinstance(n, Reduce) for a in n.over}]
    )


def _parts_of(axis: Axis, place: Axis, starts: Sequence[int]) -> Sequence[Substitution]:
    """Return the indices of a place in each part."""
    only = place.extent is index(1)
    return [{axis: index(start) if only else index(place) + start} for start in starts]


def _fills_vectors(kernel: FlatKernel, length: int) -> bool:
    """Return True if parts are whole vectors in each tensor, in a kernel without products."""
    wide = all(length * n.dtype.itemsize % VECTOR_BYTES == 0 for n in kernel.loads)
    return wide and _sums_only(kernel)


def _sums_only(kernel: FlatKernel) -> bool:
    """Return True for a kernel without products, and without other reductions than sums."""
    return all(n.monoid is SUM and factors(n) is None for n in kernel.reductions)


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
    """Return the branch that the outermost conditions choose for a part: chains are long."""
    while isinstance(node, Select):
        compared = _compared(node.condition)
        if compared is None or compared[0] is not axis:
            break
        node = node.then if start < compared[1] else node.other
    return node


def _by_parts(
    kernel: FlatKernel, axis: Axis, place: Axis, places: Sequence[Substitution]
) -> Stores:
    """Return the stores of each part, at a place in it; those without the axis are the first's."""
    simplify = simplifier()
    masks = [_within(axis, place, at) for at in places]
    summed = added_up(kernel, {axis: (places, (place,))}, masks)
    parts: list[tuple[Store, ...]] = []
    for at, mask in zip(places, masks, strict=True):
        start = at[axis] - (index(0) if at[axis].is_constant else index(place))
        stores = [s for s in summed.stores if at is places[0] or axis in s.indices[0].axes]
        if mask is not None:
            stores = [replace(s, expr=guarded(s.expr, axis, mask), guard=mask) for s in stores]
        if start.is_constant:
            stores = [replace(s, expr=_taken(s.expr, axis, start.const)) for s in stores]
        parts.append(tuple(placed(s, at, simplify) for s in stores))
    return tuple(parts)


def _within(axis: Axis, place: Axis, at: Substitution) -> Expr | None:
    """Return where a part's places are inside the axis, or None if all are."""
    left = axis.extent - at[axis] + index(place)
    if not left.is_constant or left.const >= place.extent.const:
        return None
    return op("lt", IndexValue(index(place), I32), IndexValue(left, I32))


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
    return unrolled(kernel, {axis: new}, (store for part in parts for store in part))
