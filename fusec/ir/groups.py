"""Groups of consecutive rows: which rows a group has is read from a table of ascending ends.

Group e has the rows from ``ends[e - 1]`` to ``ends[e]``. The operation ``member`` says so, with the
value ``begin <= s and s < end``; as its name tells that ends ascend, the loops of reductions that
are the identity outside of a group can be bounded by numbers that are read. There are two::

    y[s, n] = sum(e: where(member(s, ends[e-1], ends[e]), sum(k: x[s, k] * w[e, k, n]), 0))
    d[e, k, n] = sum(s: x[s, k] * y[s, n] if member(s, ends[e-1], ends[e]))

The first runs over the groups that rows of a tile belong to: the first group is the number of ends
up to the first row, as ends ascend, and the last one the number of ends up to the last row. The
second runs over the rows of a group. Whatever the table holds, no loop leaves its axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusec.ir.combine import identities
from fusec.ir.dtype import INT32_MAX
from fusec.ir.expr import Expr, IndexValue, Op, Reduce
from fusec.ir.index import Axis, Index, Runtime, greatest, index, product
from fusec.ir.serial import needed_conditions


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The groups that a reduction runs over, each with the rows for which its terms count.

    Attributes:
        axis: the groups.
        row: the row that a term belongs to.
        begin, end: a group's first row and the row behind its last, which vary along the axis.
    """

    axis: Axis
    row: Index
    begin: Expr
    end: Expr


def groups_of(node: Reduce) -> RowGroups | None:
    """Return the groups that a reduction runs over, or None if it runs over none."""
    if len(node.bodies) != 1:
        return None
    for condition in needed_conditions(node.body, *identities(node)):
        if not isinstance(condition, Op) or condition.name != "member":
            continue
        row, begin, end = condition.args
        axes = [a for a in node.over if a in end.axes and a not in row.axes]
        if len(axes) == 1 and isinstance(row, IndexValue):
            return RowGroups(axes[0], row.index, begin, end)
    return None


def group_axes(reductions: Iterable[Reduce]) -> frozenset[Axis]:
    """Return the axes of groups that reductions run over."""
    found = (groups_of(node) for node in reductions)
    return frozenset(one.axis for one in found if one is not None)


def pairs_of(nodes: Iterable[Expr]) -> dict[Axis, frozenset[Axis]]:
    """Return the axes of groups among some nodes, each with the axes of the rows in them."""
    found: dict[Axis, frozenset[Axis]] = {}
    for node in nodes:
        if isinstance(node, Op) and node.name == "member":
            row, begin, end = node.args
            for axis in (begin.axes | end.axes) - row.axes:
                found[axis] = found.get(axis, frozenset()) | row.axes
    return found


def visited(axes: frozenset[Axis], pairs: Mapping[Axis, frozenset[Axis]]) -> frozenset[Axis]:
    """Return the axes along which points are visited: a row is in one group, not in all."""
    return frozenset(a for a in axes if axes.isdisjoint(pairs.get(a, ())))


def rows_of_a_group(pairs: Mapping[Axis, frozenset[Axis]]) -> dict[Axis, int]:
    """Return the axes of rows, each with how many rows a group has on average."""
    found: dict[Axis, int] = {}
    for axis, rows in pairs.items():
        count = product(row.extent for row in rows).hint()
        found.update(dict.fromkeys(rows, max(1, count // max(axis.extent.hint(), 1))))
    return found


def member_edges(condition: Expr) -> tuple[Index, ...]:
    """Return indices that are not above 0 where a row is in its group; none for other conditions.

    ``member(s, begin, end)`` has ``begin - s`` and ``s - end + 1``.
    """
    match condition:
        case Op(name="and", args=args):
            return tuple(edge for part in args for edge in member_edges(part))
        case Op(name="member", args=(IndexValue(index=row), begin, end)):
            last = greatest(row)
            extent = index(INT32_MAX) if last is None else last + 2
            return index(Runtime(begin, extent)) - row, row - index(Runtime(end, extent)) + 1
        case _:
            return ()
