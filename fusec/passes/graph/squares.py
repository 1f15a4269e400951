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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fusec.ir.dtype import I64, DType
from fusec.ir.expr import Const, Expr, IndexValue, Op, Reduce, Select, cast, in_range
from fusec.ir.graph import Def
from fusec.ir.index import Axis, Index, index, product
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import with_guard

Axes: TypeAlias = tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Squares:
    """A sum of the squares of ``value - centre``, and the line that sums ``value``.

    Attributes:
        total: the line that sums ``value``.
        place: indices of the sum of the same values in its buffer.
    """

    value: Expr
    centre: Expr
    total: Def
    place: tuple[Index, ...]


def find_squares(found: Mapping[Def, Reduce]) -> dict[Def, Squares]:
    """Return line -> its sum of squares, for lines whose values an earlier line sums."""
    squares: dict[Def, Squares] = {}
    for line, reduction in found.items():
        difference = _squared(reduction)
        if difference is None:
            continue
        value, centre = difference.args
        for other, total in found.items():
            if other is line:
                break
            place = _place_of_sum(other, total, value, reduction.over, line.axes)
            if place is not None:
                squares[line] = Squares(value, centre, other, place)
                break
    return squares


def _squared(reduction: Reduce) -> Op | None:
    """Return the difference ``f - g`` whose squares are summed, g constant in the sum, or None."""
    if reduction.monoid is not SUM or not reduction.dtype.is_float:
        return None
    body = reduction.body
    if not (isinstance(body, Op) and body.name == "mul" and body.args[0] is body.args[1]):
        return None
    inner = body.args[0]
    if not (isinstance(inner, Op) and inner.name == "sub"):
        return None
    return inner if inner.args[1].axes.isdisjoint(reduction.over) else None


def _place_of_sum(
    line: Def, total: Reduce, value: Expr, over: Axes, axes: Axes
) -> tuple[Index, ...] | None:
    """Return the indices over ``axes`` at which ``line`` has the sum of ``value``, or None."""
    kept = [a for a in line.axes if a in total.axes]
    wanted = [a for a in axes if a in value.axes]
    if total.monoid is not SUM or total.dtype is not value.dtype:
        return None
    if _extents(total.over) != _extents(over) or _extents(kept) != _extents(wanted):
        return None
    theirs, ours = (*total.over, *kept), (*over, *wanted)
    same = dict(zip(theirs, map(index, ours), strict=True))
    if total.body.substitute(same) is not value:
        return None
    return tuple(same.get(a, index(0)) for a in line.axes)


def _extents(axes: Sequence[Axis]) -> list[Index]:
    return [a.extent for a in axes]


@dataclass(frozen=True, slots=True)
class Moments:
    """How to compute a part's sum ``s`` and its sum ``q`` of squared deviations from its mean.

    Attributes:
        total: (values, axes of the part) -> s.
        squares: (values, axes of the part, s) -> q.
    """

    total: Callable[[Expr, Axes], Expr]
    squares: Callable[[Expr, Axes, Expr], Expr]


def _sum(value: Expr, inner: Axes) -> Expr:
    return Reduce(SUM, inner, value)


def _squares(value: Expr, inner: Axes, total: Expr) -> Expr:
    rows = at_least_one(count_rows(inner, value.dtype))
    away = Op("sub", (value, Op("div", (total, rows))))
    return _sum(Op("mul", (away, away)), inner)


def _sum_by_shift(value: Expr, inner: Axes) -> Expr:
    shift = _shift(value, inner)
    whole = Op("mul", (count_rows(inner, value.dtype), shift))
    return Op("add", (_sum(Op("sub", (value, shift)), inner), whole))


def _squares_by_shift(value: Expr, inner: Axes, total: Expr) -> Expr:
    away = Op("sub", (value, _shift(value, inner)))
    once, twice = _sum(away, inner), _sum(Op("mul", (away, away)), inner)
    rows = at_least_one(count_rows(inner, value.dtype))
    rest = Op("sub", (twice, Op("div", (Op("mul", (once, once)), rows))))
    return Op("maximum", (rest, Const(0.0, rest.dtype)))


TWO_PASS = Moments(_sum, _squares)
"""For values that stay available for a second pass, as a tile in registers does."""
SHIFTED_ONE_PASS = Moments(_sum_by_shift, _squares_by_shift)
"""For values that are read once: one sweep computes both sums, shifted by one of the values."""


def _shift(value: Expr, inner: Axes) -> Expr:
    """Return the shift k; 0 where it would be infinite or NaN, or where the part is empty."""
    zero = Const(0.0, value.dtype)
    first = _value_at(value, {a: index(0) for a in inner}, inner, zero)
    middle = _value_at(value, {a: a.extent // 2 for a in inner}, inner, first)
    last = _value_at(value, {a: a.extent - 1 for a in inner}, inner, first)
    low, high = (Op(name, (first, middle)) for name in ("minimum", "maximum"))
    shift = Op("maximum", (low, Op("minimum", (high, last))))
    finite = Op("eq", (Op("sub", (shift, shift)), zero))
    return Select(finite, shift, zero)


def _value_at(value: Expr, place: dict[Axis, Index], inner: Axes, other: Expr) -> Expr:
    """Return the value of a part at ``place``, or ``other`` where a short part ends before it."""
    found = value.substitute(place)
    for axis in inner:
        end = axis.extent if axis.limit is None else axis.limit
        guard = in_range(place[axis], 0, end)
        if guard is not None:
            found = Select(guard, with_guard(found, guard), other)
    return found


def joined(squares: Expr, total: Expr, rows: Expr, centre: Expr) -> Expr:
    """Return ``q + n * (s / n - g)^2``: a part's term of the sum of squared deviations from g."""
    away = Op("sub", (Op("div", (total, at_least_one(rows))), centre))
    return Op("add", (squares, Op("mul", (rows, Op("mul", (away, away))))))


def count_rows(inner: Axes, dtype: DType) -> Expr:
    """Return the number ``n`` of values in a part; 0 for parts past the end."""
    whole: Index = product(a.extent for a in inner if a.limit is None)
    if all(a.limit is None for a in inner) and whole.is_constant:
        return Const(float(whole.const), dtype)
    rows: Expr = IndexValue(whole)
    for axis in inner:
        if axis.limit is not None:
            left = Op("minimum", (IndexValue(axis.extent), IndexValue(axis.limit)))
            rows = Op("mul", (rows, Op("maximum", (left, Const(0, I64)))))
    return cast(rows, dtype)


def at_least_one(rows: Expr) -> Expr:
    """Return ``max(rows, 1)``, to divide by."""
    return rows if isinstance(rows, Const) else Op("maximum", (rows, Const(1.0, rows.dtype)))
