"""Bounds of loops that are values: computed from indices, or read from memory.

Worked example: the rows of a tile, 128 from ``m*128``, are in the groups from ``sum(e: ends[e] <=
m*128)`` to ``sum(e: ends[e] <= m*128 + 127)``. All ends are loaded at once, as lanes.
"""

from __future__ import annotations

from fusec.codegen.lowering.band import TileGroups
from fusec.codegen.lowering.layout import below
from fusec.codegen.lowering.values import Values
from fusec.ir.dtype import I32, I64, INT32_MAX
from fusec.ir.expr import Cast, Const, Expr, IndexValue, Op, Reduce, Select, as_value
from fusec.ir.index import Axis, Index, Runtime, index, is_nonnegative, most
from fusec.ir.monoid import SUM
from fusec.passes.schedule.pointwise import power_of_two


class LoopBounds(Values):
    """Find the groups that a loop runs over."""

    def group_bounds(self, loop: Axis, tile: TileGroups) -> tuple[Index, tuple[Index, ...]]:
        """Return the first group of a tile's rows, and the one behind the last.

        They are counted where the number of groups is known; else a loop runs over all groups.
        """
        if not loop.extent.is_constant:
            return index(0), ()
        lane = Axis(f"{loop.name}i", index(power_of_two(loop.extent.const)))
        self.lanes.append(lane)
        if lane.extent is not loop.extent:
            for scope in self.scopes:
                scope.masks[lane] = below(index(lane), loop.extent)

        end = tile.groups.end.substitute({tile.groups.axis: index(lane)})

        def before(row: Index) -> Index:
            ended = Cast(Op("le", (end, IndexValue(row, end.dtype))), I32)
            return index(Runtime(self.value(Reduce(SUM, (lane,), ended)), loop.extent + 1))

        return before(tile.first), (before(tile.last) + 1,)


def extent_if(condition: Expr, extent: Index) -> Index:
    """Return the end of a loop: its extent, or 0 where a condition is false."""
    end = Select(condition, as_value(extent), Const(0, I64))
    return index(Runtime(end, extent + 1))


def extent_times(factor: Expr, extent: Index) -> Index:
    """Return the end of a loop: its extent, unless a factor is not positive.

    It is a product, not a ``Select`` of constants, from which ptxas would know the trip count.
    """
    end = Op("mul", (Cast(factor, I64), as_value(extent)))
    return index(Runtime(end, extent + 1))


def later(start: Index, full: Index) -> Index:
    """Return the start of the part behind a loop's full tiles, or of a band that starts later.

    Where no bound of theirs is known, the largest index in 32 bits stands for it.
    """
    if start is index(0):
        return full
    last = Op("maximum", (IndexValue(start), IndexValue(full)))
    bounds = [most(start), most(full)]
    high = max((b for b in bounds if b is not None), default=0)
    extent = INT32_MAX if None in bounds else max(high, 0) + 1
    return index(Runtime(last, index(extent)))


def not_below_zero(start: Index) -> Index:
    """Return ``max(start, 0)``: a band's start is negative in the first rows."""
    if is_nonnegative(start):
        return start
    high = most(start)
    kind = I32 if high is not None and high < INT32_MAX else I64
    first = Op("maximum", (IndexValue(start, kind), Const(0, kind)))
    return index(Runtime(first, index(INT32_MAX if high is None else max(high, 0) + 1)))
