"""End loops over lanes where an axis ends within a tile.

A plan cuts an axis in tiles of one size, so the last tile may have lanes beyond the axis's end, and
what these hold is never seen (``Program.counts``). On a GPU they are free; on a CPU they take time:
of 197 keys in tiles of 64, the last tile has 5. Loops and products stop at the elements that exist,
along an axis of vectors at the last vector that has one. So products need no masked operands.

Worked example, ``count(ki) = 197 - 64*ko``: in ``for ko in 0 .. 3`` a tile is whole, so its loops
have constant trip counts; in the rest, ``for ko in 3 .. 4``, they stop at 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusec.codegen.cpp.tile_uses import TileUses
from fusec.ir.expr import Const, Dot, Expr, Select, substitute
from fusec.ir.index import Axis, Index, floordiv, index, is_nonnegative, mod
from fusec.ir.program import For, Let, Program, Statement, Update, map_statements


@dataclass(slots=True, eq=False)
class TileBounds:
    """Bounds of the elements of lane axes, at a place in a program.

    Attributes:
        counts: as of the program.
        loops: the open loops of the program, outermost first.
    """

    counts: Mapping[Axis, tuple[Index, ...]]
    loops: list[For] = field(default_factory=list)

    @staticmethod
    def of(program: Program) -> TileBounds:
        grid = [For(axis, index(0), (axis.extent,), ()) for axis in program.grid]
        return TileBounds(dict(program.counts), grid)

    def elements(self, lane: Axis) -> tuple[Index, ...]:
        """Return upper bounds of the lanes of an axis that exist.

        These are (n,) if their number is known, (extent, n) if n depends on open loops, and
        (extent,) where the loop over tiles is not open, or several ends vary.
        """
        most, others = lane.extent.const, list[Index]()
        open_ = {loop.axis for loop in self.loops}
        for count in map(self.here, self.counts.get(lane, ())):
            if count.is_constant and count.const >= 0:
                most = min(most, count.const)
            elif count.axes <= open_ and not self._always(count - lane.extent):
                others.append(count)
        if others:
            alone = len(others) == 1 and most == lane.extent.const
            return (lane.extent, *others) if alone else (lane.extent,)
        return (index(most),)

    def partial(self, lane: Axis, size: int) -> Index | None:
        """Return the number of elements that exist if the last group of ``size`` may lack some."""
        last = self.elements(lane)[-1]
        return None if mod(last, index(size)) is index(0) else last

    def groups(self, lane: Axis, size: int) -> tuple[Index, ...]:
        """Return bounds of the groups of ``size`` elements that have one that exists."""
        return tuple(floordiv(n + (size - 1), index(size)) for n in self.elements(lane))

    def here(self, count: Index) -> Index:
        """Return an index with the axes of loops of one iteration replaced."""
        single = {loop.axis: loop.start for loop in self.loops if _runs_once(loop)}
        return substitute(count, single) if count.axes & single.keys() else count

    def _always(self, value: Index) -> bool:
        """Return True if a value that falls along open loops is at least 0 at their ends."""
        for loop in reversed(self.loops):
            step = value.coefficient(loop.axis)
            if loop.axis in value.axes and step is not None and is_nonnegative(-1 * step):
                last = (substitute(value, {loop.axis: stop - 1}) for stop in loop.stops)
                return any(map(self._always, last))
        return is_nonnegative(value)


def drop_operand_masks(program: Program, width: int) -> Program:
    """Drop masks at an axis's end from the operands of products, which stop there."""
    uses, counts = TileUses.of(program, width), dict(program.counts)

    def unmasked(operand: Expr) -> Expr:
        match uses.values.get(operand):
            case Select(condition=mask, then=value, other=Const(value=0)):
                ends = uses.counts(mask)
                if ends and all(end in counts.get(lane, ()) for lane, end in ends.items()):
                    return value
        return operand

    def visit(statement: Statement) -> tuple[Statement, ...]:
        match statement:
            case Let(value=Dot() as dot) | Update(value=Dot() as dot):
                left, right = unmasked(dot.left), unmasked(dot.right)
                return (replace(statement, value=Dot(left, right, dot.over, dot.into, dot.tf32)),)
        return (statement,)

    return replace(program, body=map_statements(program.body, visit)) if counts else program


def _runs_once(loop: For) -> bool:
    length = min((s - loop.start for s in loop.stops if (s - loop.start).is_constant),
                 key=lambda n: n.const, default=index(0))  # fmt: skip
    return length is index(1)
