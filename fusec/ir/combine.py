"""What reductions do, as expressions: the rows of the table of monoids that lowering prints.

``combine`` joins two states of a reduction, as many values as it has bodies; ``folded`` is
the result of the states of several lanes. Both are written in operations and in reductions of one
value, so that programs, and printers, know no others.

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
"""What a reduction finds in a part of its points, a state."""


def identities(node: Reduce) -> tuple[Const, ...]:
    """Return the state of a reduction over nothing."""
    pairs = zip(node.monoid.parts, node.bodies, strict=True)
    return tuple(Const(part.identity(body.dtype), body.dtype) for part, body in pairs)


def combine(monoid: Monoid, old: State, new: State) -> State:
    """Return the state that two states become."""
    if len(old) == 1:
        return (Op(monoid.combine, (*old, *new)),)
    (value, place), (other, there) = old, new
    least = Op("minimum", (place, there))  # of equal values; or one is NaN, whose index is less
    unless = Select(Op(monoid.combine, (value, other)), place, least)
    best = Op(monoid.parts[0].combine, (value, other))
    return best, Select(Op(monoid.combine, (other, value)), there, unless)


def folded(monoid: Monoid, over: tuple[Axis, ...], state: State) -> Expr:
    """Return the result of a state in each of some lanes."""
    if len(state) == 1:
        return Reduce(monoid, over, *state)
    value, place = state
    best = Reduce(monoid.parts[0], over, value)
    found: Expr = Op("eq", (value, best))
    if value.dtype.is_float:
        found = Op("or", (found, Op("isnan", (value,))))
    nowhere = Const(MIN.identity(place.dtype), place.dtype)
    return Reduce(MIN, over, Select(found, place, nowhere))


def rfactor(node: Reduce, into: Mapping[Axis, Index], inner: tuple[Axis, ...]) -> Parts:
    """Return what a reduction finds in a part of its points: the state that parts combine.

    ``max(n: x[n])`` with n = p*R + i is ``max(i: x[p*R + i])``; the reduction of these over p is
    the whole. (Halide's word, for reductions over part of an axis.)

    Args:
        into: reduced axis -> index over the part's number and ``inner``, and what else is renamed.
    """
    bodies = substitute_all(node.bodies, into)
    parts = node.monoid.parts
    return tuple(Reduce(part, inner, *bodies[: len(part.parts)]) for part in parts)
