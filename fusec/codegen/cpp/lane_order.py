"""Choose the vectorized axis of each tile: one order of all lane axes; a tile's last is its column.

One global order gives each tile its rows and columns, and makes tiles that are used together agree.
The order minimizes the number of elements copied or packed: loads and stores should be contiguous
along the columns; a product's right operand needs the summed axis as rows, in memory or copied to
panels; random numbers for four adjacent elements are drawn at once. A statement in a loop is
weighted by the loop's trips, or by a guess where they are more or not known (``CodeTuning.trips``).

Worked example, an attention: keys, queries, then the head's dimension. So the scores have a vector
of queries for each key; the queries are copied to panels once, keys and values are read in place,
and the maximum and the sum of a row are reduced lane by lane, without horizontal reductions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fusec.codegen.cpp.tile_uses import Place, TileUses, placed
from fusec.ir.expr import Dot, Expr, IndexValue, Load, Op, Reduce, Var
from fusec.ir.index import Axis, Index, index
from fusec.ir.program import PACKED, For, Let, Program, Put, Statement, Update


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """An order of lane axes."""

    axes: tuple[Axis, ...]

    def sorted(self, lanes: Iterable[Axis]) -> tuple[Axis, ...]:
        """Return the lanes of a tile in order: its row, if it has two, and its column."""
        return tuple(sorted(lanes, key=self.axes.index))

    def sides(self, dot: Dot) -> tuple[Expr, Expr]:
        """Return the operands of a product, the one with the result's rows first."""
        *_, column = self.sorted(dot.axes)
        return (dot.left, dot.right) if column in dot.right.axes else (dot.right, dot.left)


def lane_order(program: Program, uses: TileUses) -> LaneOrder:
    """Return the order of lane axes for which a program of tiles copies least."""
    if len(program.lanes) > uses.code.ordered:
        return LaneOrder(program.lanes)
    body = list(placed(program.body))
    runs = _runs(body, uses.code.trips)
    orders = map(LaneOrder, itertools.permutations(program.lanes))
    return min(orders, key=lambda order: sum(_costs(body, runs, uses, order)))


def _runs(body: list[tuple[Place, Statement]], guess: int) -> dict[Place, int]:
    """Return path -> how often the statement runs.

    Args:
        guess: the trips of a loop, unless they are known and fewer.
    """
    inside: dict[Place, int] = {(): 1}
    runs: dict[Place, int] = {}
    for place, statement in body:
        runs[place] = inside[place[:-1]]
        if isinstance(statement, For):
            known = (s.const for s in statement.stops if s.is_constant)
            inside[place] = runs[place] * max(1, min((guess, *known)))
    return runs


def _costs(
    body: list[tuple[Place, Statement]], runs: dict[Place, int], uses: TileUses, order: LaneOrder
) -> Iterator[float]:
    for place, statement in body:
        match statement:
            case Let(value=Dot() as dot) | Update(value=Dot() as dot):
                yield _right(dot, place, runs, uses, order)
                yield _gathered_left(dot, runs, uses, order)
                yield _slot(dot, uses, order)
            case _:
                points = math.prod(lane.extent.const for lane in uses.domain(statement))
                yield runs[place] * points * _cost(statement, uses, order)


def _cost(statement: Statement, uses: TileUses, order: LaneOrder) -> float:
    match statement:
        case Let(var=var, value=Load() as load) if len(var.axes) == 2 and uses.elementwise(var):
            return _access(load.indices[0], order, uses)
        case Let(value=Reduce() as node) if (
            order.sorted(node.body.axes & uses.lanes)[-1] in node.over
        ):
            return uses.code.folded
        case Let(var=var, value=Op(name="random", args=(_, at))) if len(var.axes) == 2:
            position = uses.values.get(at, at)
            step = None
            if isinstance(position, IndexValue):
                step = position.index.coefficient(order.sorted(var.axes)[-1])
            return 0.0 if step in (index(1), index(2), index(4)) else uses.code.drawn
        case Put(offset=offset) if len(offset.axes & uses.lanes) == 2:
            return _access(offset, order, uses)
    return 0.0


def _access(offset: Index, order: LaneOrder, uses: TileUses) -> float:
    lanes = order.sorted(offset.axes & uses.lanes)
    if uses.steps_by_one(offset, lanes[-1]):
        return 0.0
    return uses.code.copied if offset.steps_by_one(lanes[0]) else uses.code.scattered


def _slot(dot: Dot, uses: TileUses, order: LaneOrder) -> float:
    """Return the cost of accumulating in a slot of a larger array: infinite unless it is
    contiguous along the columns."""
    load = uses.load(dot.into) if dot.into is not None else None
    if load is None:
        return 0.0
    column = order.sorted(dot.axes)[-1]
    return 0.0 if load.indices[0].steps_by_one(column) else math.inf


def _gathered_left(dot: Dot, runs: dict[Place, int], uses: TileUses, order: LaneOrder) -> float:
    """Return the cost of copying a left operand at a place that is read: never read in place."""
    left, _ = order.sides(dot)
    (terms,) = dot.over
    row, *_ = order.sorted(dot.axes)
    load = uses.load(left)
    if load is None or not load.gathers or load.indices[0].steps_by_one(terms):
        return 0.0
    times = runs[uses.defined[left]] if isinstance(left, Var) else 1
    return uses.code.scattered * terms.extent.const * row.extent.const * times


def _right(
    dot: Dot, place: Place, runs: dict[Place, int], uses: TileUses, order: LaneOrder
) -> float:
    """Return the cost of bringing the right operand to panels: 0 if it is read in place.

    A copy counts where the load stands: one hoisted out of loops is made once. Narrow operands,
    loaded or computed, are packed by each product.
    """
    _, right = order.sides(dot)
    (terms,) = dot.over
    *_, column = order.sorted(dot.axes)
    narrow, elements = right.dtype in PACKED, terms.extent.const * column.extent.const
    if uses.load(right) is None:
        good = narrow or order.axes.index(terms) < order.axes.index(column)
    else:
        good = uses.direct(right, terms, column, right=True) is not None
    if good:
        return uses.code.packed * elements * runs[place] if narrow else 0.0
    times = runs[uses.defined[right]] if isinstance(right, Var) else 1
    return uses.code.copied * elements * times
