"""Schedule of transformed products on CPUs: tiles whose terms stay in a core's cache.

A grid point is a block of tiles by some columns. It transforms the operand of its tiles into an
array, multiplies one pair of matrices for each term, and transforms the products back
(``codegen/lowering/transformed.py``). In the plan the rows, together, are ``grid by`` the tiles of
a block, the groups of columns ``grid by`` those of a block.

Worked example, 64 to 64 channels: 48 tiles of 4 * 4 terms are 192 KB, their products as many. Of
512 channels both are 1.5 MB, more than a second-level cache of 2 MB.
"""

from __future__ import annotations

from fusec.errors import InternalError
from fusec.ir.graph import Kernel
from fusec.ir.index import index, product
from fusec.ir.machine import Machine
from fusec.ir.transformed import TransformedProduct, is_contiguous, match_transformed
from fusec.passes.schedule.plan import Binding, LoopKind, Plan


def accepts(kernel: Kernel, machine: Machine) -> bool:
    """Return True if this schedule can run a kernel."""
    found = match_transformed(kernel)
    if found is None or found.lane.extent is not index(machine.vector):
        return False
    whole = found.channels.extent.is_constant and found.channels.extent.const % machine.vector == 0
    grid = {*found.rows, found.groups, found.lane, *found.places}
    offsets = [s.buffer.offset(s.indices) for s in found.stores]
    stored = all(o.axes >= grid - {None} and o.steps_by_one(found.lane) for o in offsets)
    return whole and bool(found.rows) and stored and is_contiguous(found.operand, found.channels)


def plans(kernel: Kernel, machine: Machine) -> tuple[Plan, ...]:
    """Return the plan of a kernel, as a tuple."""
    found = match_transformed(kernel)
    if found is None:
        raise InternalError(f"{kernel.name} was not accepted", stage="passes.schedule")
    tiles, groups = _block(found, machine)
    bindings: list[Binding] = []
    for axis in kernel.axes:
        if axis in kernel.inside:
            bindings.append(Binding(axis, LoopKind.LOOP))
        elif axis is found.lane:
            bindings.append(Binding(axis, LoopKind.LANES, machine.vector))
        elif axis is found.groups:
            bindings.append(Binding(axis, LoopKind.GRID, chunk=groups))
        elif axis in found.places:
            bindings.append(Binding(axis, LoopKind.GRID))
        else:  # a row, or what the lowering cuts into a row and a place
            side = found.sides.get(axis, index(1)).const
            bindings.append(Binding(axis, LoopKind.GRID, side, chunk=tiles))
    return (Plan(tuple(bindings), warps=0, dots=True),)


def _block(found: TransformedProduct, machine: Machine) -> tuple[int, int]:
    """Return the tiles and the groups of columns of a block, so that all cores have blocks."""
    tuning, width = machine.transformed, machine.vector
    groups = found.groups.extent.const if found.groups is not None else 1
    count = product(a.extent for a in found.rows).hint()
    shared = -(-count // tuning.blocks)
    tiles = min(tuning.tiles, max(tuning.least, -(-shared // tuning.step) * tuning.step))
    blocks = -(-count // tiles)
    parts = max(1, min(-(-tuning.blocks // blocks), groups * width // tuning.columns))
    return tiles, -(-groups // parts)
