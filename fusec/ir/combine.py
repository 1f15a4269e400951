"""Reductions as expressions: how lowering combines the states of any monoid.

A state has one value for each body of the reduction. ``combine`` joins two states; ``folded`` is
the result of the states of several lanes. Both consist of operations and of reductions of one
value, so that programs and printers need no others.

Worked example, ``argmax`` of (v, i) and (w, j)::

    maximum(v, w), where(w > v, j, where(v > w, i, minimum(i, j)))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from fusec.ir.expr import Const, Expr, Op, Reduce, Select, substitute_all
from fusec.ir.index import Axis, Index
from fusec.ir.monoid import MIN, Monoid

State: TypeAlias = tuple[Expr, ...]
"""Values that a reduction carries, one for each of its bodies."""
Parts: TypeAlias = tuple[Reduce, ...]
"""A state, as reductions over a part of the points."""


def identities(node: Reduce) -> tuple[Const, ...]:
    """Return the state of a reduction over no points."""
    pairs = zip(node.monoid.fields, node.bodies, strict=True)
    return tuple(Const(part.identity(body.dtype), body.dtype) for part, body in pairs)


def combine(monoid: Monoid, old: State, new: State) -> State:
    """Return the combination of two states."""
    if len(old) == 1:
        return (Op(monoid.combine, (*old, *new)),)
    (value, place), (other, there) = old, new
    least = Op("minimum", (place, there))  # for equal values, and for a NaN, whose index is less
    unless = Select(Op(monoid.combine, (value, other)), place, least)
    best = Op(monoid.fields[0].combine, (value, other))
    return best, Select(Op(monoid.combine, (other, value)), there, unless)


def folded(monoid: Monoid, over: tuple[Axis, ...], state: State) -> Expr:
    """Return the result of the states in the lanes of ``over``."""
    if len(state) == 1:
        return Reduce(monoid, over, *state)
    value, place = state
    best = Reduce(monoid.fields[0], over, value)
    found: Expr = Op("eq", (value, best))
    if value.dtype.is_float:
        found = Op("or", (found, Op("isnan", (value,))))
    nowhere = Const(MIN.identity(place.dtype), place.dtype)
    return Reduce(MIN, over, Select(found, place, nowhere))


def rfactor(node: Reduce, into: Mapping[Axis, Index], inner: tuple[Axis, ...]) -> Parts:
    """Return the partial reductions over ``inner``, a state for each part of the points.

    ``max(n: x[n])`` with n = p*R + i is ``max(i: x[p*R + i])``; the reduction of these over p is
    the whole. (Halide's word, for reductions over part of an axis.)

    Args:
        into: reduced axis -> index over the part's number and ``inner``; other axes to rename.
    """
    bodies = substitute_all(node.bodies, into)
    parts = node.monoid.fields
    return tuple(Reduce(part, inner, *bodies[: len(part.fields)]) for part in parts)
