"""Order the loops of a kernel, if one order is legal for all its reductions.

A reduction over O whose value varies along F runs in one of two ways: F outside O, and the value is
a scalar (or a tile of lanes) that is complete when O ends; or O outside F, and it accumulates in an
array over F. Lanes cannot be reduced out of an array, so a reduction over the lane axis needs F
outside; and on targets without private arrays, every reduction does.
"""

from __future__ import annotations

from fusec.ir.expr import Reduce
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.index import Axis, product
from fusec.passes.dag import stable_topological_sort

ARRAY_ELEMENTS = 1 << 16
"""The longest private array: 256 KB of f32, which a core's second-level cache holds."""


def nest_order(kernel: Kernel, lane: Axis | None, *, arrays: bool) -> tuple[Axis, ...] | None:
    """Return the kernel's inside axes, outermost first and the lane axis last, or None.

    Args:
        arrays: reductions may accumulate in private arrays.
    """
    inside = [a for a in kernel.inside if a is not lane]
    reductions = [n for n in kernel_nodes(kernel) if isinstance(n, Reduce)]
    before: dict[Axis, set[Axis]] = {a: set() for a in inside}
    for node in reductions:
        free = [a for a in inside if a in node.axes]
        if arrays and lane not in node.over:
            continue
        for axis in node.over:
            if axis in before:
                before[axis].update(free)
    for axis in inside:  # the limit of a ragged axis depends on its outer axes
        if axis.limit is not None:
            before[axis].update(a for a in inside if a in axis.limit.axes)
    order = stable_topological_sort(inside, before)
    if order is None:
        return None
    nest = (*order, lane) if lane is not None and lane in kernel.inside else tuple(order)
    return nest if _arrays_fit(reductions, nest, lane, arrays) else None


def _arrays_fit(
    reductions: list[Reduce], nest: tuple[Axis, ...], lane: Axis | None, arrays: bool
) -> bool:
    """Return True if no reduction needs an array that is forbidden or too long."""
    for node in reductions:
        outermost = next((k for k, a in enumerate(nest) if a in node.over), None)
        if outermost is None:
            continue
        within = [a for a in nest[outermost:] if a in node.axes]
        if not arrays and any(a is not lane for a in within):
            return False
        length = product(a.extent for a in within).hint()
        if lane in node.axes and lane not in nest:  # a lane axis on the grid runs in chunks
            length *= min(lane.extent.hint(), ARRAY_ELEMENTS)
        if length > ARRAY_ELEMENTS:
            return False
    return True
