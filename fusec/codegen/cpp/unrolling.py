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

from fusec.codegen.cpp.fields import fields, is_widening
from fusec.ir.expr import Load, Var
from fusec.ir.index import Axis, Index, index
from fusec.ir.machine import CodeTuning
from fusec.ir.program import For, Let, Put, Statement, statements


def is_unrolled(loop: For, lane: Axis | None, code: CodeTuning) -> bool:
    """Return True for a loop with a small constant trip count and a small body.

    Args:
        lane: the vectorized axis; None in a kernel without vectors.
    """
    if not _is_short(loop, code):
        return False
    free = frozenset(var for var, field in fields(loop.body).items() if field is None)
    return _size(loop, lane, code, free) <= code.instructions


def _is_short(loop: For, code: CodeTuning) -> bool:
    return all(s.is_constant and s.const <= code.unrolled for s in (loop.start, *loop.stops))


def _size(statement: Statement, lane: Axis | None, code: CodeTuning, free: frozenset[Var]) -> int:
    """Estimate the number of instructions of a statement with every loop in it unrolled.

    A loop that cannot be unrolled exceeds ``instructions``, and so does any loop around it.

    Args:
        free: values that are not computed.
    """
    match statement:
        case For() if _is_short(statement, code):
            trips = min(stop.const for stop in statement.stops) - statement.start.const
            return trips * sum(_size(s, lane, code, free) for s in statement.body)
        case For():
            return code.instructions + 1
        case Let(value=Load(indices=(offset,), guard=guard)):
            skipped = guard is not None and lane not in guard.axes
            return _accesses(offset, lane) + code.branch * skipped
        case Let(var=var, value=value) if var in free or is_widening(value):
            return 0
        case Put(offset=offset):
            return _accesses(offset, lane)
        case _:
            return 1


def _accesses(offset: Index, lane: Axis | None) -> int:
    """Return the number of memory accesses of a vector: one if contiguous or uniform, two of pairs,
    else W."""
    if lane is None or lane not in offset.axes or offset.steps_by_one(lane):
        return 1
    return 2 if offset.coefficient(lane) is index(2) else lane.extent.const


def has_many_gathers(body: tuple[Statement, ...], lane: Axis | None, most: int) -> bool:
    """Return True if statements contain more than ``most`` masked gathers."""
    loads = [s.value for s in statements(body) if isinstance(s, Let) and isinstance(s.value, Load)]
    guarded = [n.indices[0] for n in loads if n.guard is not None and lane in n.indices[0].axes]
    return sum(lane is not None and o.coefficient(lane) is None for o in guarded) > most
