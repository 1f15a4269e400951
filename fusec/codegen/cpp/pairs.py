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


def half_of_pair(buffer: Buffer, offset: Index, lane: Axis | None) -> int | None:
    """Return which element of a pair each lane has: 0 or 1; None if memory is not in pairs."""
    if lane is None or offset.coefficient(lane) is not index(2):
        return None
    which, odd = offset % 2, buffer.base.flat().shape[0] % 2
    return which.const if which.is_constant and odd is index(0) else None


def paired_puts(
    body: Sequence[Statement], lane: Axis | None
) -> Mapping[int, tuple[Put, Put] | None]:
    """Return position -> the two stores that are one there, the lower first.

    They are printed in the place of the later one; the earlier one has None.
    """
    found: dict[int, tuple[Put, Put] | None] = {}
    waiting: dict[Buffer, tuple[int, Put]] = {}
    for position, statement in enumerate(body):
        match statement:
            case Put(buffer=buffer, offset=offset):
                earlier = waiting.pop(buffer, None)
                if half_of_pair(buffer, offset, lane) is None:
                    continue
                if earlier is None:
                    waiting[buffer] = position, statement
                elif (pair := _pair(earlier[1], statement)) is not None:
                    found[earlier[0]], found[position] = None, pair
            case Let(value=Load(buffer=buffer)):
                waiting.pop(buffer, None)
            case Let():
                pass
            case _:
                waiting.clear()
    return found


def _pair(first: Put, second: Put) -> tuple[Put, Put] | None:
    low, high = sorted((first, second), key=lambda put: put.offset.const)
    beside = high.offset is low.offset + 1 and low.offset % 2 is index(0)
    return (low, high) if beside and low.guard is high.guard else None
