"""Products of few rows: each weight is read once, and multiplied with all rows there and then.

A product of at most some rows waits for its weights, which are as many as without any other row.
What it takes is told from its sum here; the frontend's spelling, the rows' place among the factors
and the type of the operands do not matter.

Worked example: ``sum(k: x[m, k] * w[n, k])`` with m of 4 streams w along k. Its rows are ``(m,)``
and its column is n; with m of extent 1, which no expression has as an axis, it has no rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.ir.contraction import sides
from fusec.ir.expr import Expr, Load, Reduce, postorder
from fusec.ir.index import Axis, index, product


@dataclass(frozen=True, slots=True)
class Streamed:
    """A product of few rows.

    Attributes:
        rows: the axes of the rows, of constant extents; none where there is one row.
        column: the axis of what is streamed.
        few: the operand that has the rows, in f32.
    """

    rows: tuple[Axis, ...]
    column: Axis
    few: Expr


def streamed(node: Expr, most: int) -> Streamed | None:
    """Return a sum as a product of at most ``most`` rows; None for anything else.

    Both operands are contiguous along what it sums over.
    """
    found = sides(node)
    if found is None or not isinstance(node, Reduce) or found.shared or len(node.over) != 1:
        return None
    for few, many, own, others in (
        (found.left, found.right, found.left_axes, found.right_axes),
        (found.right, found.left, found.right_axes, found.left_axes),
    ):
        rows = product(a.extent for a in own)
        if not rows.is_constant or rows.const > most or len(others) != 1:
            continue
        (column,) = others
        columns = column.extent
        if columns.is_constant and columns.const <= rows.const:
            continue
        if all(_is_contiguous(operand, node.over[0]) for operand in (few, many)):
            return Streamed(tuple(sorted(own, key=lambda a: a.serial)), column, few)
    return None


def _is_contiguous(operand: Expr, axis: Axis) -> bool:
    """Return True if what an operand loads along an axis are neighbours."""
    found = [n for n in postorder((operand,)) if isinstance(n, Load) and axis in n.axes]
    steps = {load.buffer.offset(load.indices).coefficient(axis) for load in found}
    return steps == {index(1)}
