"""Order the loops of a kernel, if one order is legal for all its reductions.

A reduction over O whose value varies along F runs in one of two ways: F outside O, and the value is
a scalar (or a tile of lanes) that is complete when O ends; or O outside F, and it accumulates in an
array over F. Lanes cannot be reduced out of an array, so a reduction over the lane axis needs F
outside; and on targets without private arrays, every reduction does. A scatter runs the second way,
in the memory of its result if that is stored as it is; a scan in the loop that it scans along.
"""

from __future__ import annotations

from fusec.errors import InternalError
from fusec.ir.expr import Reduce, Scan
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.index import Axis
from fusec.ir.machine import Machine
from fusec.ir.serial import hits_of, stored_scatters
from fusec.passes.dag import stable_topological_sort
from fusec.passes.schedule.access import count


def nest_order(kernel: Kernel, lane: Axis | None, machine: Machine) -> tuple[Axis, ...] | None:
    """Return the kernel's inside axes, outermost first and the lane axis last, or None.

    On a CPU, reductions may accumulate in private arrays.
    """
    inside = [a for a in kernel.inside if a is not lane]
    reductions = kernel.reductions
    before: dict[Axis, set[Axis]] = {a: set() for a in inside}
    for node in reductions:
        for hit in hits_of(node):
            before[hit.axis].update(a for a in (*node.over, *hit.place.axes) if a in before)
        free = [a for a in inside if a in node.axes]
        if machine.is_cpu and lane not in node.over:
            continue
        for axis in node.over:
            if axis in before:
                before[axis].update(free)
    for scan in (n for n in kernel_nodes(kernel) if isinstance(n, Scan)):
        # It keeps values from point to point, no arrays: all that it varies along is outside.
        if lane in kernel.inside and lane in scan.axes and lane not in scan.over:
            return None
        for axis in scan.over:
            if axis in before:
                before[axis].update(a for a in inside if a in scan.axes and a not in scan.over)
    for axis in inside:  # the limit of a ragged axis depends on its outer axes
        if axis.limit is not None:
            before[axis].update(a for a in inside if a in axis.limit.axes)
    order = stable_topological_sort(inside, before)
    if order is None:
        return None
    nest = (*order, lane) if lane is not None and lane in kernel.inside else tuple(order)
    stored = stored_scatters(kernel)
    arrays = [n for n in reductions if n not in stored]
    return nest if _arrays_fit(arrays, nest, lane, machine) else None


def loop_nest(kernel: Kernel, lane: Axis | None, machine: Machine) -> tuple[Axis, ...]:
    """Return the ``nest_order`` of a kernel that a schedule has accepted."""
    nest = nest_order(kernel, lane, machine)
    if nest is None:
        raise InternalError(f"no loop order for {kernel.name}", stage="passes.schedule")
    return nest


def _arrays_fit(
    reductions: list[Reduce], nest: tuple[Axis, ...], lane: Axis | None, machine: Machine
) -> bool:
    """Return True if no reduction needs an array that is forbidden or too long."""
    longest = machine.loops.array
    for node in reductions:
        outermost = next((k for k, a in enumerate(nest) if a in node.over), None)
        if outermost is None:
            continue
        within = [a for a in nest[outermost:] if a in node.axes]
        if not machine.is_cpu and any(a is not lane for a in within):
            return False
        length = count(tuple(within))
        if lane in node.axes and lane not in nest:  # a lane axis on the grid runs in chunks
            length *= min(lane.extent.hint(), longest)
        if length > longest:
            return False
    return True
