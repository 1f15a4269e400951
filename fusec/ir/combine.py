"""Reductions as expressions: how any monoid folds in an element, and how parts are merged.

A state has one value for each field of the monoid. ``combine`` joins two states; ``folded`` is the
result of the states of several lanes; ``rfactor`` gives the states of the parts of a reduction.
All consist of operations and of reductions of one field, so that programs and printers need no
others.

Worked example, ``argmax`` of (v, i) and (w, j)::

    maximum(v, w), where(w > v, j, where(v > w, i, minimum(i, j)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fusec.ir.expr import Const, Expr, Op, Reduce, Scan, Select, substitute_all
from fusec.ir.index import Axis, Index
from fusec.ir.monoid import MIN, Monoid

State: TypeAlias = tuple[Expr, ...]
"""Values that a reduction carries, one for each field of its monoid."""


def identities(node: Reduce | Scan) -> tuple[Const, ...]:
    """Return the state of a reduction over no points."""
    pairs = zip(node.monoid.fields, node.bodies, strict=True)
    return tuple(Const(field.identity(body.dtype), body.dtype) for field, body in pairs)


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

    ``max(n: x[n])`` with n = p*R + i is ``max(i: x[p*R + i])``, to be reduced over p. (Halide's
    word, for reductions over part of an axis.)
    """
    bodies, fields = substitute_all(node.bodies, split.value), node.monoid.fields
    over = split.inside(node.over)
    return tuple(Reduce(field, over, *bodies[: len(field.fields)]) for field in fields)
