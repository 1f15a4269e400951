"""Find vector stores that are side by side in memory, to print two of them as one call.

Lanes that are two elements apart leave every other element to another store. Each alone would go
lane by lane; together they are two vectors, shuffled. Loads need no partner: what is between two
lanes is in memory, too.

Worked example, lanes i: ``z[2*i] := a; ...; z[2*i + 1] := b`` is ``stp_f32(z, a, b)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.ir.expr import Buffer, Load
from fusec.ir.index import Axis, Index, index
from fusec.ir.program import Let, Put, Statement
from fusec.passes.kernel.unroll_pairs import unroll_pairs
from fusec.passes.stage import Stage

CPP_FLAT = (
    Stage(
        "unroll_pairs",
        "unroll an innermost axis of two: pairs are loaded and stored together (CPU)",
        lambda flat, context: unroll_pairs(flat),
        "FlatKernel",
        "FlatKernel",
        needs=("coalesce",),
    ),
)


def half_of_pair(buffer: Buffer, offset: Index, lane: Axis | None) -> int | None:
    """Return which element of a pair each lane has: 0 or 1; None if memory is not in pairs."""
    if lane is None or offset.coefficient(lane) is not index(2):
        return None
    which, odd = offset % 2, buffer.base.flat().shape[0] % 2
    return which.const if which.is_constant and odd is index(0) else None


def paired_puts(body: Sequence[Statement], lane: Axis | None) -> Mapping[int, int]:
    """Return position of a store -> position of the earlier one that is stored with it."""
    found: dict[int, int] = {}
    waiting: dict[Buffer, int] = {}
    for position, statement in enumerate(body):
        match statement:
            case Put(buffer=buffer, offset=offset):
                earlier = waiting.pop(buffer, None)
                if half_of_pair(buffer, offset, lane) is None:
                    continue
                if earlier is None:
                    waiting[buffer] = position
                elif _beside(body[earlier], statement):
                    found[position] = earlier
            case Let(value=Load(buffer=buffer)):
                waiting.pop(buffer, None)
            case Let():
                pass
            case _:
                waiting.clear()
    return found


def _beside(first: Statement, second: Put) -> bool:
    assert isinstance(first, Put)
    low, high = sorted((first.offset, second.offset), key=lambda offset: offset.const)
    together = high is low + 1 and low % 2 is index(0)
    return together and first.guard is second.guard
