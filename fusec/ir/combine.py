"""Reductions as expressions: how any monoid folds in an element, and how parts are merged.

A state has one value for each field of the monoid. ``combine`` joins two states, the second one of
later points; ``folded`` is the result of the states of several lanes; ``rfactor`` gives the states
of the parts of a reduction. All consist of operations and of reductions of one field, so that
programs and printers need no others.

Worked example, ``argmax`` of (v, i) and (w, j), ``recurrence`` of (a, b) and, after it, (c, d)::

    maximum(v, w), where(w > v, j, where(v > w, i, minimum(i, j)))
    c * a, c * b + d
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fusec.errors import InternalError
from fusec.ir.dtype import BOOL
from fusec.ir.expr import (
    Const,
    Expr,
    Op,
    Reduce,
    Scan,
    Select,
    Var,
    cast,
    op,
    postorder,
    reach,
    select,
    substitute_all,
)
from fusec.ir.index import Axis, Index
from fusec.ir.monoid import EXPSUM, MAX, MIN, RECURRENCE, SUM, Monoid

State: TypeAlias = tuple[Expr, ...]
"""Values that a reduction carries, one for each field of its monoid."""


def identities(node: Reduce | Scan) -> tuple[Const, ...]:
    """Return the state of a reduction over no points."""
    pairs = zip(node.monoid.fields, node.bodies, strict=True)
    return tuple(Const(field.identity(body.dtype), body.dtype) for field, body in pairs)


def combine(monoid: Monoid, old: State, new: State) -> State:
    """Return the combination of two states, the first one of earlier points."""
    if len(old) == 1:
        return (Op(monoid.combine, (*old, *new)),)
    if monoid is RECURRENCE:
        (factor, term), (again, added) = old, new
        return _product(again, factor), _product(again, term) + added
    if monoid is EXPSUM:
        (greatest, total), (exponent, weight) = old, new
        lesser = _decay(greatest, exponent)
        keeps, grows = total + _product(lesser, weight), _product(lesser, total) + weight
        top = op("maximum", greatest, exponent)
        return top, Select(op("ge", greatest, exponent), keeps, grows)
    return _better(monoid, old, new)


def _product(factor: Expr, term: Expr) -> Expr:
    """Return a product; where the factor is a truth value, the term or 0."""
    if factor.dtype is BOOL:
        return select(factor, term, 0)
    return op("mul", cast(factor, term.dtype), term)


def _decay(a: Expr, b: Expr) -> Expr:
    """Return ``exp(-abs(a - b))``, 1 if both are the same infinity."""
    return op("exp", select(op("eq", a, b), 0.0, -op("abs", a - b)))


def carried(node: Reduce | Scan) -> tuple[bool, ...]:
    """Return for each field whether any later result depends on what was combined of it so far.

    Those of a ``recurrence`` depend on the last term alone, not on the product of the factors.
    """
    old = tuple(Var("old", body.dtype, frozenset()) for body in node.bodies)
    read = [frozenset(postorder((new,))) for new in combine(node.monoid, old, node.bodies)]
    fields = range(len(old))
    needed = reach((fields[-1],), lambda field: [k for k in fields if old[k] in read[field]])
    return tuple(k in needed for k in fields)


def _better(monoid: Monoid, old: State, new: State) -> State:
    """Return the combination of two extremes with their places."""
    (value, place), (other, there) = old, new
    least = op("minimum", place, there)  # for equal values, and for a NaN, whose index is less
    unless = Select(Op(monoid.combine, (value, other)), place, least)
    best = Op(monoid.fields[0].combine, (value, other))
    return best, Select(Op(monoid.combine, (other, value)), there, unless)


def folded(monoid: Monoid, over: tuple[Axis, ...], state: State) -> Expr:
    """Return the result of the states in the lanes of ``over``.

    Raises:
        InternalError: for an ordered reduction, as lanes have no order.
    """
    if monoid.ordered:
        raise InternalError(f"{monoid} over lanes", stage="ir.combine")
    if len(state) == 1:
        return Reduce(monoid, over, *state)
    if monoid is EXPSUM:
        exponent, weight = state
        lesser = _decay(exponent, Reduce(MAX, over, exponent))
        return Reduce(SUM, over, _product(lesser, weight))
    value, place = state
    best = Reduce(monoid.fields[0], over, value)
    found = op("eq", value, best)
    if value.dtype.is_float:
        found = found | op("isnan", value)
    return Reduce(MIN, over, select(found, place, MIN.identity(place.dtype)))


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """The reduced axes of a reduction, split into parts.

    Attributes:
        part: the axis of the parts.
        inner: the axes that one part reduces.
        value: reduced axis -> index over ``part`` and ``inner``.
    """

    part: Axis
    inner: tuple[Axis, ...]
    value: Mapping[Axis, Index]

    def inside(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Return ``axes`` as they are inside a part: ``inner`` in place of those that are split."""
        found = (b for a in axes for b in (self.inner if a in self.value else (a,)))
        return tuple(dict.fromkeys(found))


def rfactor(node: Reduce, split: AxisSplit) -> tuple[Reduce, ...]:
    """Return the state of each part of a reduction; the reduction of these is the whole.

    Parts are neighbouring points, so that an ordered reduction combines them in order.

    ``max(n: x[n])`` with n = p*R + i is ``max(i: x[p*R + i])``, to be reduced over p. (Halide's
    word, for reductions over part of an axis.)
    """
    bodies, fields = substitute_all(node.bodies, split.value), node.monoid.fields
    over = split.inside(node.over)
    return tuple(Reduce(field, over, *bodies[: len(field.fields)]) for field in fields)
