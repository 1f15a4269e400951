"""Schedules: how each axis of a kernel runs on a target (grid, loop or lanes).

``SCHEDULES`` is tried in order; the first that accepts a kernel plans it. A new schedule is one module
with ``accepts`` and ``plan``, and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable

from fusec.errors import InternalError
from fusec.ir.graph import Kernel
from fusec.passes.schedule import columnwise, pointwise, rowwise
from fusec.passes.schedule.plan import Plan

SCHEDULES: tuple[tuple[Callable[[Kernel], bool], Callable[[Kernel], Plan]], ...] = (
    (pointwise.accepts, pointwise.plan),
    (rowwise.accepts, rowwise.plan),
    (columnwise.accepts, columnwise.plan),
)


def choose_gpu_plan(kernel: Kernel) -> Plan:
    """Return the plan of a kernel with flat accesses for a GPU."""
    for accepts, plan in SCHEDULES:
        if accepts(kernel):
            return plan(kernel)
    raise InternalError(f"no schedule accepts {kernel.name}", stage="passes.schedule")
