"""Store the equal parts of a concatenation one by one (CPU).

Spec: ``flat kernel, machine -> flat kernel``, the same values. Which part an element is in is a
chain of comparisons with its position, one for each part: a stack of the steps of a recurrence
would compare each element with each step. Where parts are equally long, a grid point computes one
place of each part instead.

Worked example, a stack of the results of eight steps::

    y[t, i] = where(t < 1, a[i], where(t < 2, b[i], ...))        grid t:8 i:256
    y[0, i] = a[i];  y[1, i] = b[i];  ...                        grid i:256
"""

from __future__ import annotations

import math
from dataclasses import replace

from fusec.ir.expr import Expr, IndexValue, Op, Select, substitute
from fusec.ir.graph import FlatKernel, Store, kernel_nodes
from fusec.ir.index import Axis, index
from fusec.ir.machine import Machine
from fusec.passes.graph.simplify import simplifier


def unroll_parts(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return a pointwise kernel with a store for each of many equal parts, else unchanged."""
    if kernel.inside or any(a.limit is not None for a in kernel.axes):
        return kernel
    for axis, ends in _ends(kernel).items():
        length = math.gcd(axis.extent.const, *ends)
        count = axis.extent.const // length
        whole = all(s.indices[0].coefficient(axis) is not index(0) for s in kernel.stores)
        lanes = any(s.indices[0].steps_by_one(axis) for s in kernel.stores)
        wide = length >= machine.vector if lanes else True
        if whole and wide and machine.loops.least_parts <= count <= len(ends) + 1:
            return _by_parts(kernel, axis, length)
    return kernel


def _ends(kernel: FlatKernel) -> dict[Axis, set[int]]:
    """Return grid axis -> the positions with which conditions compare it."""
    found: dict[Axis, set[int]] = {}
    for node in kernel_nodes(kernel):
        if isinstance(node, Select) and (compared := _compared(node.condition)) is not None:
            axis, end = compared
            if axis in kernel.grid and axis.extent.is_constant:
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


def _by_parts(kernel: FlatKernel, axis: Axis, length: int) -> FlatKernel:
    """Return a kernel over the places of one part, with the stores of each part."""
    place, simplify = Axis(axis.name, index(length)), simplifier()
    stores: list[Store] = []
    for start in range(0, axis.extent.const, length):
        at = {axis: index(place) + start if length > 1 else index(start)}
        for store in kernel.stores:
            (expr,) = simplify((_taken(store.expr, axis, start).substitute(at),))
            stores.append(Store(store.buffer, (substitute(store.indices[0], at),), expr))
    grid = tuple(place if a is axis else a for a in kernel.grid if a is not axis or length > 1)
    return FlatKernel(replace(kernel, grid=grid, stores=tuple(stores), labels=()))
