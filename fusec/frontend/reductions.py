"""Reductions: ``out[kept] = monoid(reduced: x[...])``, accumulated in f32, f64 or a wide integer.

Worked example, the mean of the rows of a bf16 matrix::

    mean[i0] = bf16(sum(r1: f32(x[i0, r1])) / 768.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusec.errors import Unsupported
from fusec.frontend.arithmetic import div, equal, like, select, sub
from fusec.frontend.call import Body, Call, Indices, Scalar
from fusec.frontend.comparisons import truth
from fusec.frontend.domain import (
    Domain,
    Extreme,
    Region,
    reduction,
    region,
)
from fusec.frontend.registry import lowers
from fusec.frontend.value import ZERO, Value, make_axes, positions
from fusec.ir.dtype import BOOL, I64, accumulate_type, compute_type
from fusec.ir.expr import Const, Expr, cast, op
from fusec.ir.index import product
from fusec.ir.monoid import ALL, ANY, MAX, MIN, PROD, SUM, Monoid

aten = torch.ops.aten


def reduced(call: Call, over: Region, monoid: Monoid, value: Callable[[Domain], Expr]) -> Value:
    """Emit the reduction of a value over each region."""
    return call.define(reduction(over.at, monoid, value))


# -- sums and products ----------------------------------------------------------------------------


@lowers(aten.sum.dim_IntList)
def sum_dims(
    call: Call,
    x: Value,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    return total(call, SUM, x, dims, keepdim)


@lowers(aten.prod.default, aten.prod.dim_int)
def prod_dim(
    call: Call,
    x: Value,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    return total(call, PROD, x, dim, keepdim)


def total(
    call: Call, monoid: Monoid, x: Value, dims: Sequence[int] | int | None, keepdim: bool
) -> Value:
    """Emit a sum or product in the accumulation type of the result."""
    kind = I64 if call.out.dtype is BOOL else accumulate_type(call.out.dtype)
    return reduced(call, region(x, dims, keepdim), monoid, lambda p: p.term(x, kind))


@lowers(aten.mean.default, aten.mean.dim)
def mean_dims(
    call: Call,
    x: Value,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    over = region(x, dims, keepdim)
    return call.define(mean(over, lambda p: p.read(x, compute_type(call.out.dtype))))


def mean(over: Region, value: Callable[[Domain], Expr]) -> Body:
    """Return the mean of a value over each region."""
    total = reduction(over.at, SUM, value)

    def body(at: Indices) -> Expr:
        sum_of_all = total(at)
        return div(sum_of_all, over.count(sum_of_all.dtype))

    return body


# -- variances ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and variance of each region, in two passes: the mean, then the squares about it.

    Attributes:
        x: what is summed.
        center: its mean.
        divisor: what the sum of squares is divided by.
    """

    x: Value
    over: Region
    center: Value
    divisor: Expr

    @classmethod
    def of(cls, call: Call, x: Value, over: Region, correction: Scalar | None) -> Spread:
        """Emit the mean; ``correction`` is 1 if None."""
        correction = 1 if correction is None else correction
        if not isinstance(correction, int | float):
            raise Unsupported("a symbolic correction")
        kind = compute_type(call.out.dtype)
        center = call.scratch("mean", over.shape, kind, mean(over, lambda p: p.read(x, kind)))
        count = over.count(kind)
        if isinstance(count, Const):
            divisor: Expr = Const(max(count.value - correction, 0), kind)
        else:
            divisor = sub(count, correction) if correction else count
            divisor = op("maximum", divisor, like(0.0, divisor))
        return cls(x, over, center, divisor)

    def squares(self, at: Indices) -> Expr:
        points = self.over.at(at)
        away = sub(points.read(self.x, self.center.dtype), self.center.at(at))
        return points.reduce(SUM, op("mul", away, away))

    def variance(self, at: Indices) -> Expr:
        return div(self.squares(at), self.divisor)


@dataclass(frozen=True, slots=True)
class ExactSpread:
    """Mean and variance relative to each region's first value: of equal values exactly 0.

    That is what the slope of a deviation, infinite at 0, asks for. Nor do values far from 0 lose
    their differences' digits.

    Attributes:
        plain: the mean by itself.
        first: that value, over the result's indices.
        rest: the spread of ``x - first``.
    """

    plain: Body
    first: Body
    rest: Spread

    @classmethod
    def of(cls, call: Call, x: Value, over: Region, correction: Scalar | None) -> ExactSpread:
        kind = compute_type(call.out.dtype)
        axes = make_axes(x.shape)
        at = positions(axes)
        here = cast(x.at(at), kind)
        first = cast(x.at(tuple(ZERO if k in over.dims else i for k, i in enumerate(at))), kind)
        # Compared, for a compiler may round ``a * b - first`` only once, which is not 0.
        rest = select(equal(here, first), like(0.0, here), sub(here, first))
        spread = Spread.of(call, Value(x.shape, kind, axes, rest), over, correction)
        own = mean(over, lambda p: p.read(x, kind))
        return cls(own, lambda at: cast(x.at(over.first(at)), kind), spread)

    def mean(self, at: Indices) -> Expr:
        # Relative to a first value that is far larger, digits of the mean would be lost.
        first, plain = self.first(at), self.plain(at)
        near = op("le", op("abs", first), op("mul", like(2.0, plain), op("abs", plain)))
        return select(near, op("add", first, self.rest.center.at(at)), plain)

    def variance(self, at: Indices) -> Expr:
        first, rest = self.first(at), self.rest.variance(at)
        return select(op("isinf", first), like(math.nan, first), rest)


@lowers(aten.var.correction)
def var(
    call: Call,
    x: Value,
    dim: Sequence[int] | None = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> Value:
    return call.define(ExactSpread.of(call, x, region(x, dim, keepdim), correction).variance)


@lowers(aten.var_mean.correction)
def var_mean(
    call: Call,
    x: Value,
    dim: Sequence[int] | None = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    over = region(x, dim, keepdim)
    if correction == 0:  # as norms ask for it, whose slope is finite: it costs them 4 to 13 %
        plain = Spread.of(call, x, over, correction)
        return call.define(plain.variance, 0), spread_mean(call, plain.center)
    spread = ExactSpread.of(call, x, over, correction)
    return call.define(spread.variance, 0), call.define(spread.mean, 1)


def spread_mean(call: Call, mean: Value) -> Value:
    """Return the mean as the second result: itself if its type and layout are right already."""
    kind = call.results[1]
    buffer = mean.buffer
    if buffer is not None and buffer.dtype is kind.dtype and buffer.strides == kind.strides:
        return mean
    return call.define(mean.at, 1)


# -- extremes -------------------------------------------------------------------------------------


def extreme_dims(
    call: Call, x: Value, dims: Sequence[int] | int | None, keepdim: bool, monoid: Monoid
) -> Value:
    over = region(x, dims, keepdim)
    if x.dtype is BOOL:
        return quantify(call, x, dims, keepdim, ANY if monoid is MAX else ALL)
    return reduced(call, over, monoid, lambda p: p.read(x, compute_type(x.dtype)))


@lowers(aten.amax.default)
def amax(call: Call, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    return extreme_dims(call, x, dims, keepdim, MAX)


@lowers(aten.amin.default)
def amin(call: Call, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
    return extreme_dims(call, x, dims, keepdim, MIN)


@lowers(aten.max.default)
def max_all(call: Call, x: Value) -> Value:
    return extreme_dims(call, x, None, False, MAX)


@lowers(aten.min.default)
def min_all(call: Call, x: Value) -> Value:
    return extreme_dims(call, x, None, False, MIN)


def extreme(x: Value, over: Region, monoid: Monoid) -> Extreme:
    """Return the extreme of a region, numbered in row-major order."""
    return Extreme(x, over.at, monoid, product(x.shape[d] for d in over.dims))


@lowers(aten.max.dim)
def max_dim(call: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return extreme(x, region(x, dim, keepdim), MAX).define(call)


@lowers(aten.min.dim)
def min_dim(call: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return extreme(x, region(x, dim, keepdim), MIN).define(call)


@lowers(aten.argmax.default)
def argmax(call: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return call.define(extreme(x, region(x, dim, keepdim), MAX).place)


@lowers(aten.argmin.default)
def argmin(call: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return call.define(extreme(x, region(x, dim, keepdim), MIN).place)


# -- truth ----------------------------------------------------------------------------------------


def quantify(
    call: Call, x: Value, dims: Sequence[int] | int | None, keepdim: bool, monoid: Monoid
) -> Value:
    return reduced(call, region(x, dims, keepdim), monoid, lambda p: truth(x, p.where))


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_of(
    call: Call, x: Value, dims: Sequence[int] | int | None = None, keepdim: bool = False
) -> Value:
    return quantify(call, x, dims, keepdim, ANY)


# -- norms and exponentials -----------------------------------------------------------------------


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    call: Call,
    x: Value,
    ord: Scalar = 2,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Value:
    over = region(x, dims, keepdim)
    kind = compute_type(call.out.dtype)

    def size(points: Domain) -> Expr:
        return op("abs", points.read(x, kind))

    if ord in (math.inf, -math.inf):
        return reduced(call, over, MAX if ord > 0 else MIN, size)
    if ord == 0:
        return reduced(call, over, SUM, lambda p: cast(truth(x, p.where), kind))
    if ord == 1:
        return reduced(call, over, SUM, size)
    if ord == 2:
        squares = reduction(over.at, SUM, lambda p: op("mul", p.read(x, kind), p.read(x, kind)))
        return call.define(lambda at: op("sqrt", squares(at)))
    if not isinstance(ord, int | float):
        raise Unsupported("a norm of symbolic order")
    powers = reduction(over.at, SUM, lambda p: op("pow", size(p), Const(ord, kind)))
    return call.define(lambda at: op("pow", powers(at), Const(1 / ord, kind)))
