"""Which loops a C++ compiler is asked to take apart: the few places of a window, in registers.

Between the iterations of a loop, what the next sweep reads again is in memory; taken apart, it is a
value. So a maximum over 2x2 places and its place run at 1.3 of eager's speed instead of 0.5
(max_pool2d in channels last, one core, 2026-11).

That holds where all loops inside are taken apart, too, and of few instructions. Copies of a body
with gathers and branches gain nothing and cost g++ most: the kernels of DenseNet-121's training
(4x3x64x64), whose loops over images were taken apart around anything, took it 45 s instead of 17.

For the same reason many gathers in one kernel are calls, and so are the divisions of their places:
those of Longformer's windows, 228 gathers, took it 8.4 s where they are copied, and take it 1.3.
"""

from __future__ import annotations

from fusec.ir.expr import Load
from fusec.ir.index import Axis, Index
from fusec.ir.program import For, Let, Put, Statement, statements

MOST_UNROLLED = 8
"""Iterations of a loop that is taken apart."""
MOST_INSTRUCTIONS = 256
"""Instructions that come of it, about: those of loops inside included."""
MOST_GATHERS = 16
"""Gathers under masks that a kernel has copies of; where there are more, all are calls."""
BRANCH = 8
"""Instructions that a load costs which a condition of all lanes may skip: a branch."""


def is_unrolled(loop: For, lane: Axis | None) -> bool:
    """Return True for few iterations, of a number that is known, with little in them.

    Args:
        lane: the axis whose points are the lanes of a vector; None in a kernel without vectors.
    """
    return _is_short(loop) and _size(loop, lane) <= MOST_INSTRUCTIONS


def _is_short(loop: For) -> bool:
    return all(s.is_constant and s.const <= MOST_UNROLLED for s in (loop.start, *loop.stops))


def _size(statement: Statement, lane: Axis | None) -> int:
    """Return about how many instructions a statement is if every loop in it is taken apart.

    A loop that cannot be is more than is ever taken apart around it.
    """
    match statement:
        case For() if _is_short(statement):
            trips = min(stop.const for stop in statement.stops) - statement.start.const
            return trips * sum(_size(s, lane) for s in statement.body)
        case For():
            return MOST_INSTRUCTIONS + 1
        case Let(value=Load(indices=(offset,), guard=guard)):
            skipped = guard is not None and lane not in guard.axes
            return _accesses(offset, lane) + BRANCH * skipped
        case Put(offset=offset):
            return _accesses(offset, lane)
        case _:
            return 1


def _accesses(offset: Index, lane: Axis | None) -> int:
    """Return how many accesses of memory the lanes are: one if they are neighbours or the same."""
    if lane is None or lane not in offset.axes or offset.steps_by_one(lane):
        return 1
    return lane.extent.const


def has_many_gathers(body: tuple[Statement, ...], lane: Axis | None) -> bool:
    """Return True for more loads from anywhere, under masks, than should be copied in."""
    loads = [s.value for s in statements(body) if isinstance(s, Let) and isinstance(s.value, Load)]
    guarded = [n.indices[0] for n in loads if n.guard is not None and lane in n.indices[0].axes]
    return sum(lane is not None and o.coefficient(lane) is None for o in guarded) > MOST_GATHERS
