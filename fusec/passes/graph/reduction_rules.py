"""Simplify reductions: what is empty, repeated, chosen by position, or asks for an extreme.

Rules of ``simplify.py``, which keep every value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusec.ir.edges import edges_when
from fusec.ir.expr import (
    Const,
    Expr,
    IndexValue,
    Op,
    Reduce,
    Select,
    as_value,
    cast,
    children,
    is_op,
    op,
    reach,
    reductions,
    select,
    substitute_all,
)
from fusec.ir.index import Axis, index, is_nonnegative
from fusec.ir.monoid import ALL, EXPSUM, MAX, MIN, PROD, RECURRENCE, SUM, Monoid
from fusec.ir.rewrite import Rules
from fusec.ir.serial import serial_axes


def empty_reduction(node: Reduce) -> Expr:
    """``sum(k: x)`` over no k is 0; likewise other reductions that have an identity."""
    if node.monoid.leading or all(axis.extent is not index(0) for axis in node.over):
        return node
    return Const(node.monoid.identity(node.dtype), node.dtype)


_COMBINES = {SUM: "add", PROD: "mul", MAX: "maximum", MIN: "minimum"}


def row_and_one_more(node: Reduce) -> Expr:
    """``max(r: where(r < 8, x[r], y))`` of nine r is ``maximum(max(r: x[r]), y)``.

    An attention's sink, a key more than there are, would give its softmax other rows than scores.
    Scans and scatters stay whole: these are serial. So do products, where the last key of a cache
    is a term like all others (one query beside 512 keys took 0.16 ms for 0.12, 2026-11).
    """
    (axis, *others), combine = node.over, _COMBINES.get(node.monoid)
    last = axis.extent - 1
    if others or combine is None or axis.limit is not None or not is_nonnegative(last - 1):
        return node
    edges = (index(axis) - last + 1, last - index(axis))

    def terms(n: Expr) -> Iterable[Expr]:
        return () if isinstance(n, Reduce) or is_op(n, "mul") else children(n)

    chosen = (n.condition for n in reach((node.body,), terms) if isinstance(n, Select))
    found = any(edge in edges for c in chosen if axis in c.axes for edge in edges_when(c, True))
    if not found or serial_axes((node,)):
        return node
    rest = Axis(axis.name, last)
    own: dict[Expr, Expr] = {n: n for n in reductions(node.body) if axis in n.over}  # it is bound
    row, more = (substitute_all((node.body,), {axis: at}, own)[0] for at in (index(rest), last))
    return op(combine, Reduce(node.monoid, (rest,), row), more)


def repeated_body(node: Reduce) -> Expr:
    """``sum(c: x)`` of an x without c is ``x * C``; the maximum is x."""
    if node.monoid in (PROD, EXPSUM, RECURRENCE) or node.inner.issuperset(node.over):
        return node
    limits = frozenset(b for a in node.over if a.limit is not None for b in a.limit.axes)
    over = frozenset(node.over)
    repeats = [
        a
        for a in node.over
        if a not in node.inner | limits and (a.limit is None or over.isdisjoint(a.limit.axes))
    ]
    if not repeats:
        return node
    rest = tuple(a for a in node.over if a not in repeats)
    value = Reduce(node.monoid, rest, *node.bodies) if rest else node.bodies[-1]
    for axis in repeats:
        value = _repeat(node.monoid, axis, value)
    return value


def _repeat(monoid: Monoid, axis: Axis, value: Expr) -> Expr:
    """Return the reduction of a constant along an axis: the identity where that is empty."""
    runs = as_value(axis.extent)
    if axis.limit is not None:
        runs = op("minimum", IndexValue(axis.limit), IndexValue(axis.extent))
    result = op("mul", value, cast(runs, value.dtype)) if monoid is SUM else value
    for end in (axis.limit, axis.extent):
        if end is not None and not is_nonnegative(end - 1):
            result = select(op("gt", IndexValue(end), 0), result, monoid.identity(value.dtype))
    return result


def one_hot_sum(node: Reduce) -> Expr:
    """``sum(r: where(r == k, a, 0) * b)`` is ``a * b + 0 * b`` if k is in range and only r varies.

    The gradient of a cross-entropy selects one class by comparing the label with all classes. The
    other terms are ``0 * b``, NaN for an infinite b; an axis that may have less than two elements
    may have none of them.
    """
    if node.monoid is not SUM or len(node.over) != 1 or node.over[0].limit is not None:
        return node
    (axis,), body, factor = node.over, node.body, None
    if is_op(body, "mul"):
        body, factor = body.args if isinstance(body.args[0], Select) else body.args[::-1]
    match body:
        case Select(condition=Op(name="eq", args=(a, b)), then=value, other=Const(value=0)):
            here, wanted = (a, b) if isinstance(a, IndexValue) else (b, a)
        case _:
            return node
    varies = axis in value.axes | wanted.axes | (frozenset() if factor is None else factor.axes)
    if varies or not isinstance(here, IndexValue) or here.index is not index(axis):
        return node
    if factor is not None and not is_nonnegative(axis.extent - 2):
        return node
    below = op("lt", wanted, IndexValue(axis.extent, wanted.dtype))
    chosen = select(op("ge", wanted, 0) & below, value, 0)
    return chosen if factor is None else chosen * factor + op("mul", factor, 0)


def steady_and_one_hot_sum(node: Reduce) -> Expr:
    """``sum(r: a + one-hot)`` is the sum of a and the one-hot sum, if a does not vary along r.

    The gradient of a cross-entropy with label smoothing has this form.
    """
    if node.monoid is not SUM or len(node.over) != 1 or not is_op(node.body, "add"):
        return node
    a, b = (Reduce(SUM, node.over, term) for term in node.body.args)
    for steady, varying in ((a, b), (b, a)):
        if node.over[0] not in steady.inner and one_hot_sum(varying) is not varying:
            return steady + varying
    return node


def question_of_extreme(node: Reduce) -> Expr:
    """``any(r: x != -inf)`` is ``max(r: x) != -inf``, ``all(r: x == -inf)`` its opposite.

    Likewise +inf with ``min``. A NaN propagates through ``max`` and ``min`` and is not infinite, so
    the result is the same; over no elements, the extreme is that infinity. A softmax that tests
    whether a row is fully masked computes the maximum of the row anyway.
    """
    match node.monoid.name, node.bodies[-1]:
        case ("all", Op(name="eq", args=(value, Const(value=bound, dtype=kind)))) | (
            "any",
            Op(name="ne", args=(value, Const(value=bound, dtype=kind)))
            | Op(name="not", args=(Op(name="eq", args=(value, Const(value=bound, dtype=kind))),)),
        ) if kind.is_float and math.isinf(bound):
            extreme = Reduce(MAX if bound < 0 else MIN, node.over, value)
            equal = op("eq", extreme, bound)
            return equal if node.monoid is ALL else op("not", equal)
    return node


REDUCTION_RULES = Rules(
    (empty_reduction, Reduce),
    (repeated_body, Reduce),
    (one_hot_sum, Reduce),
    (steady_and_one_hot_sum, Reduce),
    (question_of_extreme, Reduce),
)
"""Rules that hold in every expression."""

AXIS_RULES = Rules((row_and_one_more, Reduce))
"""Rules that reduce over a new axis: for graphs alone, because no loop of a kernel binds it."""
