"""Bounds that conditions imply on indices, each as an index that is at most zero.

Worked example: ``n <= m and not n + 40 <= m`` holds exactly where ``n - m <= 0`` and
``m - n - 39 <= 0``. The terms of ``sum(n: where(n <= m, x[n], 0))`` count only where the first one
does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

from fusec.ir.expr import Cast, Const, Expr, Load, Op, Reduce, Select, index_of
from fusec.ir.groups import member_edges
from fusec.ir.index import Index
from fusec.ir.monoid import MAX, SUM

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


# -- conditions under which a term is the identity -------------------------------------------------


def edges_of_terms(reductions: Iterable[Reduce]) -> tuple[Index, ...]:
    """Return bounds without which the terms of all reductions are their identity."""
    shared: frozenset[Index] | None = None
    for node in reductions:
        known = node.monoid in (MAX, SUM) and node.dtype.is_float
        edges = frozenset(_unless(node.body, node.monoid.start) if known else ())
        shared = edges if shared is None else shared & edges
    return tuple(sorted(shared or (), key=repr))


@functools.lru_cache(maxsize=4096)
def _unless(node: Expr, identity: float) -> tuple[Index, ...]:
    """Return conditions such that ``node`` is 0 or minus infinity where any of them is false."""
    match node, identity:
        case Select(condition=c, then=a, other=Const(value=value)), _ if value == identity:
            return (*edges_when(c, True), *member_edges(c), *_unless(a, identity))
        case Load(guard=Op() as guard), 0:
            return member_edges(guard)
        case Select(condition=c, then=Const(value=value), other=b), _ if value == identity:
            return (*edges_when(c, False), *_unless(b, identity))
        case Cast(arg=a), _ if a.dtype.is_float:
            return _unless(a, identity)
        case Op(name="round_f16" | "round_bf16", args=(a,)), _:
            return _unless(a, identity)
        case Op(name="mul", args=(a, b)), 0:
            return (*_unless(a, 0), *_unless(b, 0))
        case Op(name="add" | "sub", args=(a, b)), 0:
            return tuple(edge for edge in _unless(a, 0) if edge in _unless(b, 0))
        case Op(name="div", args=(a, _)) | Op(name="neg", args=(a,)), 0:
            return _unless(a, 0)
        case Op(name="exp", args=(a,)), 0:
            return _unless(a, -math.inf)
        case Op(name="add", args=(a, b)), _:
            return (*_unless(a, identity), *_unless(b, identity))
        case Op(name="sub", args=(a, _)), _:
            return _unless(a, identity)
        case Op(name="mul", args=(a, Const(value=factor))), _ if factor > 0:
            return _unless(a, identity)
        case _:
            return ()
