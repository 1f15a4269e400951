"""Peephole rewrites of a kernel's expressions after its axes are cut: less work per lane.

A comparison that is uniform over all lanes of a tile becomes a scalar: with ``c = co*16 + ci``,
``c < 32`` is ``co < 2``. The two halves of a rotary embedding, a cat or a pad at a multiple of the
tile then branch once a tile, and their loads stay contiguous.
"""

from __future__ import annotations

from fusec.ir.expr import Expr, IndexValue, Op
from fusec.ir.index import Axis, Index, index
from fusec.ir.rewrite import rewrite


def uniform_comparisons(exprs: tuple[Expr, ...], lanes: tuple[Axis, ...]) -> tuple[Expr, ...]:
    """Return the expressions with tile-uniform index comparisons made independent of the lanes."""
    if not lanes:
        return exprs

    def rule(node: Expr) -> Expr:
        if not isinstance(node, Op) or node.name not in ("lt", "ge"):
            return node
        left, right = node.args
        if not isinstance(left, IndexValue) or not isinstance(right, IndexValue):
            return node
        # a < b is a - b < 0; flooring the quotient by the tile's width keeps the sign.
        difference = left.index - right.index
        for lane in lanes:
            if lane in difference.axes:
                tiles = _without_lane(difference, lane)
                if tiles is None:
                    return node
                difference = tiles
        if difference is left.index - right.index:
            return node
        zero = IndexValue(index(0), left.dtype)
        return Op(node.name, (IndexValue(difference, left.dtype), zero))

    return rewrite(exprs, rule)


def _without_lane(value: Index, lane: Axis) -> Index | None:
    """Return ``value // width`` if the lane only fills the gaps between multiples of its width."""
    if value.coefficient(lane) is not index(1):
        return None
    rest = value - index(lane)
    quotient = rest // lane.extent
    return quotient if quotient * lane.extent is rest and lane not in quotient.axes else None
