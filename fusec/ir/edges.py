"""Bounds that conditions imply on indices, each as an index that is at most zero.

Worked example: ``n <= m and not n + 40 <= m`` holds exactly where ``n - m <= 0`` and
``m - n - 39 <= 0``.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusec.ir.expr import Expr, Op, index_of
from fusec.ir.index import Index

OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
"""Comparison -> its negation, for numbers that are not NaN."""


def edges_when(condition: Expr, holds: bool) -> tuple[Index, ...]:
    """Return bounds that hold wherever the value of a condition is ``holds``."""
    return tuple(edge for edge in _parts(condition, holds) if edge is not None)


def all_edges_when(condition: Expr, holds: bool) -> tuple[Index, ...] | None:
    """Return the bounds that are equivalent to a condition being ``holds``, or None if unknown."""
    parts = tuple(_parts(condition, holds))
    return None if None in parts else tuple(edge for edge in parts if edge is not None)


def _parts(condition: Expr, holds: bool) -> Iterator[Index | None]:
    """Yield the bound of each conjunct of ``condition == holds``; None for one without a bound."""
    match condition:
        case Op(name="not", args=(opposite,)):
            yield from _parts(opposite, not holds)
        case Op(name="and" | "or" as name, args=args) if (name == "and") is holds:
            for part in args:
                yield from _parts(part, holds)
        case Op(name=name, args=(left, right)) if name in OPPOSITE:
            yield _edge(name if holds else OPPOSITE[name], index_of(left), index_of(right))
        case _:
            yield None


def _edge(name: str, a: Index | None, b: Index | None) -> Index | None:
    if a is None or b is None:
        return None
    match name:
        case "le":
            return a - b
        case "lt":
            return a - b + 1
        case "ge":
            return b - a
        case "gt":
            return b - a + 1
        case _:
            return None
