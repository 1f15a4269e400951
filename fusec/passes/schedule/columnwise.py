"""GPU schedule of column reductions: columns across lanes, rows in a loop of small tiles.

A tile is 32 rows by 128 columns. With few rows and many columns it has up to 512 columns; with few
columns, as in the final sum of partial ones, down to 32 and more rows, so that more programs run:
each loads what it sums at once. The accumulator keeps the tile's shape and is folded once, after
the loop. Nothing is added to memory.
"""

from __future__ import annotations

import math

from fusec.errors import InternalError
from fusec.ir.graph import FlatKernel
from fusec.ir.machine import Machine
from fusec.passes.schedule.access import fastest_axis, offsets_with_neighbour
from fusec.passes.schedule.nest import loop_nest
from fusec.passes.schedule.plan import Binding, LoopKind, Plan
from fusec.passes.schedule.pointwise import power_of_two


def accepts(kernel: FlatKernel) -> bool:
    """Return True if the contiguous axis is on the grid while others are inside."""
    column = fastest_axis(kernel, kernel.axes, offsets_with_neighbour(kernel))
    return bool(kernel.inside) and column in kernel.grid


def plan(kernel: FlatKernel, machine: Machine) -> Plan:
    """Return the plan of a column reduction."""
    column = fastest_axis(kernel, kernel.axes, offsets_with_neighbour(kernel))
    if column is None:
        raise InternalError("a column reduction without a fast axis", stage="passes.schedule")
    *outer, last = loop_nest(kernel, column, machine)
    height, columns = machine.rows.column_rows, machine.tile
    rows = min(height, power_of_two(last.extent.hint()))
    width = min(columns, power_of_two(column.extent.hint()))
    while (
        rows * width < columns * height // 4
        and column.extent.hint() >= 2 * width * machine.rows.column_programs
    ):
        width *= 2  # few rows: a thread still loads 16 bytes if there are more columns
    count = math.prod(a.extent.hint() for a in kernel.grid if a is not column)
    count *= -(-column.extent.hint() // width)
    warps = machine.rows.warps
    few = rows < last.extent.hint() <= machine.rows.final_rows
    most = machine.units * (machine.rows.final_programs if few else 1)
    while width > height and 2 * count <= most:
        width, count = width // 2, 2 * count
        if rows < last.extent.hint():
            rows, warps = 2 * rows, 2 * machine.rows.warps
    grid = [Binding(a, LoopKind.GRID, width if a is column else 1) for a in kernel.grid]
    loops = [Binding(a, LoopKind.LOOP) for a in outer]
    return Plan((*grid, *loops, Binding(last, LoopKind.LOOP, rows)), warps=warps)
