"""Sum several tiles along the same lanes at once: the warps of a program meet once for all.

Where the lanes of a sum are spread over warps, each costs three barriers. The gradient of a
LayerNorm sums two tiles of a row in each iteration: at once they take three barriers instead of
six, and 168 registers instead of 213, since neither tile waits for the other's sum (1024 columns, 4
warps, sm_90, Triton 3.7.1, 2026-11). Each is the same sum, in the same order.

Worked example: ``s = sum(c: x); y = x * s; z = x * x; t = sum(c: z)`` becomes ``z = x * x;
s, t = sum(c: x, z); y = x * s``. What the later sum needs moves to the front, unless it is loaded
in between: that tile would take registers beside the first one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fusec.ir.dtype import F32
from fusec.ir.expr import Cast, Expr, IndexValue, Op, Reduce, Select, Var
from fusec.ir.index import Axis
from fusec.ir.monoid import SUM
from fusec.ir.program import Carry, Let, Statement, Unzip, Update, needed_values, statements


@dataclass(frozen=True, slots=True, eq=False)
class JointSum:
    """Sums of tiles of one shape along the lanes ``over``: a tile for each of ``lets``."""

    lets: tuple[Let, ...]
    tiles: tuple[Var, ...]
    over: tuple[Axis, ...]


def find_joint_sums(body: Iterable[Statement]) -> Iterator[Statement | JointSum]:
    """Yield the statements of a block, with sums that can run at once as one ``JointSum``."""
    left = list(body)
    while left:
        first = left.pop(0)
        if not isinstance(first, Let) or (shape := _summed(first)) is None:
            yield first
            continue
        together = [first]
        for other in list(left):
            if not isinstance(other, Let) or _summed(other) != shape:
                continue
            moved = _moved(other, together, left[: left.index(other)])
            if moved is not None:
                yield from moved
                together.append(other)
                left = [s for s in left if s is not other and s not in moved]
        yield _joint(together, shape[0]) if len(together) > 1 else first


_Shape: TypeAlias = tuple[tuple[Axis, ...], frozenset[Axis]]
"""The lanes that a tile is summed along, and all that it has."""


def _summed(let: Let) -> _Shape | None:
    """Return the shape of an f32 tile's sum along lanes; None for any other value."""
    match let.value:
        case Reduce(over=over, bodies=(Var(dtype=dtype) as tile,)) as found:
            if found.monoid is SUM and dtype is F32 and tile.axes.issuperset(over):
                return over, tile.axes
    return None


def _joint(lets: Sequence[Let], over: tuple[Axis, ...]) -> JointSum:
    tiles = (let.value.body for let in lets if isinstance(let.value, Reduce))
    return JointSum(tuple(lets), tuple(t for t in tiles if isinstance(t, Var)), over)


def _moved(sum_: Let, others: Sequence[Let], between: Sequence[Statement]) -> list[Let] | None:
    """Return the values that move to the front along with a sum, or None if it has to stay."""
    made: dict[Expr, Let] = {s.var: s for s in between if isinstance(s, Let)}
    needed = needed_values([sum_], made)
    moved = [let for var, let in made.items() if var in needed]
    changed = {s.var for s in statements(between) if isinstance(s, Update | Carry)}
    changed |= {half for s in statements(between) if isinstance(s, Unzip) for half in s.halves}
    is_free = needed.isdisjoint({*changed, *(let.var for let in others)})
    computed = all(isinstance(let.value, Op | Cast | Select | IndexValue) for let in moved)
    return moved if is_free and computed else None
