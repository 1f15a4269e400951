"""Split sums of squared deviations into partial sums that do not depend on the mean of the whole.

``v = sum(i: (f[i] - g)^2)``, where g comes from ``s = sum(i: f[i])``, reads f again after s. Parts
use their own means instead, and are combined when g is known (Chan, Golub and LeVeque, "Algorithms
for computing the sample variance", 1983)::

    v = sum(p: q[p] + n[p] * (s[p] / n[p] - g)^2),  q[p] = sum(i: (f[p, i] - s[p] / n[p])^2)

This is exact for any g. One sweep over a part computes both of its sums, shifted by a value k::

    s[p] = sum(i: f - k) + n*k,  q[p] = sum(i: (f - k)^2) - sum(i: f - k)^2 / n

The subtraction cancels digits in proportion to the square of k's distance from the part's mean, in
standard deviations. So k is the median of the part's first, middle and last value: usually within
one deviation, and more than a few away only if two of the three are outliers on the same side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fusec.ir.dtype import DType
from fusec.ir.expr import (
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    cast,
    in_range,
    loads,
    op,
)
from fusec.ir.graph import Def
from fusec.ir.index import Axis, Index, index, product
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import with_guard

Axes: TypeAlias = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Squares:
    """A sum of the squares of ``value - centre``.

    Attributes:
        total: the line that sums ``value``, from which the centre is computed.
        place: indices of that sum in its buffer.
    """

    value: Expr
    centre: Expr
    total: Def
    place: tuple[Index, ...]


def find_squares(found: Mapping[Def, Reduce]) -> dict[Def, Squares]:
    """Return line -> its sum of squares, where their centre is computed from the values' sum."""
    lines = {line.buffer: line for line in found}
    squares: dict[Def, Squares] = {}
    for line, reduction in found.items():
        away = _squared(reduction)
        if away is None:
            continue
        value, centre = away.args
        for load in loads((centre,)):
            total = lines.get(load.buffer)
            if total is not None and _is_sum(load, total, found[total], value, reduction.over):
                squares[line] = Squares(value, centre, total, load.indices)
    return squares


def _squared(reduction: Reduce) -> Op | None:
    """Return the difference ``f - g`` whose squares are summed, g constant in the sum, or None."""
    match reduction:
        case Reduce(monoid=monoid, body=Op(name="mul", args=(Op(name="sub") as away, other))):
            centred = away is other and away.args[1].axes.isdisjoint(reduction.over)
            return away if centred and monoid is SUM and reduction.dtype.is_float else None
    return None


def _is_sum(load: Load, line: Def, total: Reduce, value: Expr, over: Axes) -> bool:
    """Return True if a load reads a line that is computed from the sum of ``value``, ``total``."""
    lengths = [[axis.extent for axis in axes] for axes in (total.over, over)]
    if load.guard is not None or total.monoid is not SUM or lengths[0] != lengths[1]:
        return False
    axes, indices = (*line.axes, *total.over), (*load.indices, *map(index, over))
    return total.body.substitute(dict(zip(axes, indices, strict=True))) is value


# -- the sums of a part ----------------------------------------------------------------------------

Shift: TypeAlias = Callable[[Expr, Axes], Expr]
"""Returns the value by which the values of a part are shifted, from them and the part's axes."""


def total(value: Expr, inner: Axes, shift: Shift | None) -> Expr:
    """Return a part's sum ``s``."""
    if shift is None:
        return Reduce(SUM, inner, value)
    whole = op("mul", count_rows(inner, value.dtype), k := shift(value, inner))
    return Reduce(SUM, inner, value - k) + whole


def squares(value: Expr, inner: Axes, shift: Shift | None, sums: Expr) -> Expr:
    """Return a part's sum ``q`` of squared deviations from its mean, from its sum if not shifted.

    Without a shift the values must stay available for a second sweep, as a tile in registers does.
    """
    rows = at_least_one(count_rows(inner, value.dtype))
    away = value - (sums / rows if shift is None else shift(value, inner))
    found = Reduce(SUM, inner, op("mul", away, away))
    if shift is None:
        return found
    once = Reduce(SUM, inner, away)
    return op("maximum", found - op("mul", once, once) / rows, 0.0)


def median_of_three(value: Expr, inner: Axes) -> Expr:
    """Return the shift k; 0 where it would be infinite or NaN, or where the part is empty."""
    zero = Const(0.0, value.dtype)
    first = _value_at(value, {a: index(0) for a in inner}, inner, zero)
    middle = _value_at(value, {a: a.extent // 2 for a in inner}, inner, first)
    last = _value_at(value, {a: a.extent - 1 for a in inner}, inner, first)
    low, high = (op(name, first, middle) for name in ("minimum", "maximum"))
    shift = op("maximum", low, op("minimum", high, last))
    return Select(op("eq", shift - shift, zero), shift, zero)


def _value_at(value: Expr, place: dict[Axis, Index], inner: Axes, other: Expr) -> Expr:
    """Return the value of a part at ``place``, or ``other`` where a short part ends before it."""
    found = value.substitute(place)
    for axis in inner:
        end = axis.extent if axis.limit is None else axis.limit
        guard = in_range(place[axis], 0, end)
        if guard is not None:
            found = Select(guard, with_guard(found, guard), other)
    return found


def merged(found: Expr, sums: Expr, rows: Expr, centre: Expr) -> Expr:
    """Return ``q + n * (s / n - g)^2``: a part's term of the sum of squared deviations from g."""
    away = sums / at_least_one(rows) - centre
    return found + op("mul", rows, op("mul", away, away))


def count_rows(inner: Axes, dtype: DType) -> Expr:
    """Return the number ``n`` of values in a part; 0 for parts past the end."""
    whole: Index = product(a.extent for a in inner if a.limit is None)
    if all(a.limit is None for a in inner) and whole.is_constant:
        return Const(float(whole.const), dtype)
    rows: Expr = IndexValue(whole)
    for axis in inner:
        if axis.limit is not None:
            left = op("minimum", IndexValue(axis.extent), IndexValue(axis.limit))
            rows = op("mul", rows, op("maximum", left, 0))
    return cast(rows, dtype)


def at_least_one(rows: Expr) -> Expr:
    """Return ``max(rows, 1)``, to divide by."""
    return rows if isinstance(rows, Const) else op("maximum", rows, 1.0)
