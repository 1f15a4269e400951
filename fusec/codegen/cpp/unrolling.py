"""Choose loops that the C++ compiler unrolls: short windows, whose values stay in registers.

Values that a later sweep over a loop reads again are in memory; with the loop unrolled, they are in
registers. So a maximum over 2x2 windows and its argmax run at 1.3 of eager's speed instead of 0.5
(max_pool2d in channels last, one core, 2026-11).

That requires that all inner loops are unrolled, too, and the result is small. Unrolling a body with
gathers and branches gains nothing and costs g++ most: the kernels of DenseNet-121's training
(4x3x64x64) took it 45 s instead of 17 with the loops over images unrolled around any body.

For the same reason the gathers of a kernel with many are calls, and so are their index divisions:
Longformer's windows, 228 gathers, took g++ 8.4 s with all inlined, and take it 1.3 s.
"""

from __future__ import annotations

from fusec.ir.expr import Load
from fusec.ir.index import Axis, Index
from fusec.ir.program import For, Let, Put, Statement, statements

MOST_UNROLLED = 8
"""Greatest trip count of an unrolled loop."""
MOST_INSTRUCTIONS = 256
"""Greatest estimated size of an unrolled loop, in instructions, inner loops included."""
MOST_GATHERS = 16
"""Greatest number of masked gathers that a kernel inlines; if it has more, all are calls."""
BRANCH = 8
"""Instructions that a load under a scalar condition costs in addition: a branch."""


def is_unrolled(loop: For, lane: Axis | None) -> bool:
    """Return True for a loop with a small constant trip count and a small body.

    Args:
        lane: the vectorized axis; None in a kernel without vectors.
    """
    return _is_short(loop) and _size(loop, lane) <= MOST_INSTRUCTIONS


def _is_short(loop: For) -> bool:
    return all(s.is_constant and s.const <= MOST_UNROLLED for s in (loop.start, *loop.stops))


def _size(statement: Statement, lane: Axis | None) -> int:
    """Estimate the number of instructions of a statement with every loop in it unrolled.

    A loop that cannot be unrolled exceeds ``MOST_INSTRUCTIONS``, and so does any loop around it.
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
    """Return the number of memory accesses of a vector: one if contiguous or uniform, else W."""
    if lane is None or lane not in offset.axes or offset.steps_by_one(lane):
        return 1
    return lane.extent.const


def has_many_gathers(body: tuple[Statement, ...], lane: Axis | None) -> bool:
    """Return True if statements contain more than ``MOST_GATHERS`` masked gathers."""
    loads = [s.value for s in statements(body) if isinstance(s, Let) and isinstance(s.value, Load)]
    guarded = [n.indices[0] for n in loads if n.guard is not None and lane in n.indices[0].axes]
    return sum(lane is not None and o.coefficient(lane) is None for o in guarded) > MOST_GATHERS
