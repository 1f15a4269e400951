"""Which loops a C++ compiler is asked to take apart: the few places of a window, in registers.

Between the iterations of a loop, what the next sweep reads again is in memory; taken apart, it is a
value. So a maximum over 2x2 places and its place run at 1.3 of eager's speed instead of 0.5
(max_pool2d in channels last, one core, 2026-11).
"""

from __future__ import annotations

from fusec.ir.program import For, Statement

MOST_UNROLLED = 8
"""Iterations of a loop that is taken apart."""
MOST_STATEMENTS = 256
"""Statements that come of it, those of loops inside included."""


def is_unrolled(loop: For) -> bool:
    """Return True for few iterations, of a number that is known, with little in them."""
    few = all(s.is_constant and s.const <= MOST_UNROLLED for s in (loop.start, *loop.stops))
    return few and _size(loop) <= MOST_STATEMENTS


def _size(statement: Statement) -> int:
    """Return how many statements are left if every loop of few iterations is taken apart."""
    if not isinstance(statement, For):
        return 1
    trips = [s.const for s in statement.stops if s.is_constant and s.const <= MOST_UNROLLED]
    return min(trips, default=1) * sum(map(_size, statement.body))
