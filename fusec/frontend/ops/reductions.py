"""Reductions: ``out[kept] = monoid(reduced: x[...])``, accumulated in f32, f64 or a wide integer.

Worked example, the mean of the rows of a bf16 matrix::

    mean[i0] = bf16(sum(r1: f32(x[i0, r1])) / 768.0)
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Body, Indices, Scalar
from fusec.frontend.ops.arithmetic import equal, select
from fusec.frontend.ops.comparisons import truth
from fusec.frontend.ops.domain import Domain, Extreme, Region, reduction, region
from fusec.frontend.ops.registry import LoweringFunction, aten, lowers
from fusec.frontend.value import ZERO, Value, make_axes, positions
from fusec.ir.dtype import BOOL, F64, I64, DType, compute_type
from fusec.ir.expr import Const, Expr, cast, op
from fusec.ir.index import product
from fusec.ir.monoid import ALL, ANY, MAX, MIN, PROD, SUM, Monoid


def reduces(*targets: Any) -> Callable[[LoweringFunction], LoweringFunction]:
    """Register ``rule(call, x, over, **settings)`` as a reduction over the given dimensions.

    Over all if none are given; ``dtype`` is dropped, since the traced result has that type.
    """

    def register(rule: LoweringFunction) -> LoweringFunction:
        def lowered(
            call: AtenCall, x: Value, dim: Any = None, keepdim: bool = False, **settings: Any
        ) -> Any:
            settings.pop("dtype", None)
            return rule(call, x, region(x, dim, keepdim), **settings)

        lowers(*targets)(lowered)
        return rule

    return register


def reduced(call: AtenCall, over: Region, monoid: Monoid, value: Callable[[Domain], Expr]) -> Value:
    """Emit the reduction of a value over each region."""
    return call.define(reduction(over.at, monoid, value))


# -- sums and products ----------------------------------------------------------------------------


def total(monoid: Monoid, call: AtenCall, x: Value, over: Region) -> Value:
    """Emit a sum or product in the accumulation type of the result."""
    kind = I64 if call.out.dtype is BOOL else compute_type(call.out.dtype)
    return reduced(call, over, monoid, lambda p: p.term(x, kind))


reduces(aten.sum.dim_IntList)(partial(total, SUM))
reduces(aten.prod.default, aten.prod.dim_int)(partial(total, PROD))


@reduces(aten.mean.default, aten.mean.dim)
def mean_dims(call: AtenCall, x: Value, over: Region) -> Value:
    return call.define(mean(over, lambda p: p.read(x, compute_type(call.out.dtype))))


def mean(over: Region, value: Callable[[Domain], Expr]) -> Body:
    """Return the mean of a value over each region."""
    total = reduction(over.at, SUM, value)

    def body(at: Indices) -> Expr:
        sum_of_all = total(at)
        return sum_of_all / over.count(sum_of_all.dtype)

    return body


# -- variances ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and variance of each region.

    Attributes:
        center: the mean of what the squared deviations are taken of.
    """

    center: Value
    mean: Body
    variance: Body


def two_passes(
    call: AtenCall, x: Value, over: Region, correction: Scalar | None, kind: DType
) -> Spread:
    """Emit the mean, in the type ``kind``, for squared deviations; ``correction`` is 1 if None."""
    correction = 1 if correction is None else correction
    if not isinstance(correction, int | float):
        raise Unsupported("a symbolic correction")
    center = call.scratch("mean", over.shape, kind, mean(over, lambda p: p.read(x, kind)))
    count = over.count(kind)
    if isinstance(count, Const):
        divisor: Expr = Const(max(count.value - correction, 0), kind)
    else:
        divisor = op("maximum", count - correction if correction else count, 0.0)

    def variance(at: Indices) -> Expr:
        points = over.at(at)
        away = points.read(x, kind) - center.at(at)
        return points.reduce(SUM, away * away) / divisor

    return Spread(center, center.at, variance)


def exact_spread(call: AtenCall, x: Value, over: Region, correction: Scalar | None) -> Spread:
    """Return mean and variance relative to each region's first value: 0 for equal values.

    The gradient of a standard deviation, infinite at 0, needs that. Values far from 0 do not lose
    the digits of their differences either.
    """
    kind, axes = compute_type(call.out.dtype), make_axes(x.shape)
    at = positions(axes)
    here = cast(x.at(at), kind)
    first = cast(x.at(tuple(ZERO if k in over.dims else i for k, i in enumerate(at))), kind)
    # Compared first: a compiler may contract ``a * b - first`` to one rounding, which is not 0.
    rest = select(equal(here, first), 0.0, here - first)
    spread = two_passes(call, Value(x.shape, kind, axes, rest), over, correction, kind)
    directly = mean(over, lambda p: p.read(x, kind))

    def first_of(at: Indices) -> Expr:
        return cast(x.at(over.first(at)), kind)

    def mean_of(at: Indices) -> Expr:
        # The sum with a first value that is far larger than the mean would lose digits of the mean.
        first, plain = first_of(at), directly(at)
        near = op("le", op("abs", first), op("mul", 2.0, plain) * op("abs", plain))
        return select(near, first + spread.center.at(at), plain)

    def variance(at: Indices) -> Expr:
        first, rest = first_of(at), spread.variance(at)
        return select(op("isinf", first), math.nan, rest)

    return Spread(spread.center, mean_of, variance)


def spread_of(call: AtenCall, x: Value, over: Region, correction: Scalar | None) -> Spread:
    """Return the mean and a variance that is exactly 0 where all values are equal.

    On CPUs both are computed in f64, as in eager: no square overflows, and sums of up to 2^29
    equal values of f32 are exact. Inputs of f64 take ``exact_spread`` there, too.
    """
    if call.is_cpu and x.dtype is not F64:
        return two_passes(call, x, over, correction, F64)
    return exact_spread(call, x, over, correction)


def spread(
    root: bool, call: AtenCall, x: Value, over: Region, *, correction: Scalar | None = None
) -> Any:
    """Emit the variance of each region, or its root, and the mean if that is a result, too.

    A variance may be out of the result's range where its root is not.
    """
    with_mean = len(call.results) > 1
    if with_mean and not root and correction == 0:  # norms: exactness costs them 4 to 13 %
        plain = two_passes(call, x, over, correction, compute_type(call.out.dtype))
        return call.define(plain.variance, 0), spread_mean(call, plain.center)
    made = define_spread(root, call, spread_of(call, x, over, correction))
    return made if with_mean else made[0]


def define_spread(root: bool, call: AtenCall, *parts: Spread) -> tuple[Value, ...]:
    """Emit the sum of the variances of a number's parts, or its root; then the means, if asked."""

    def body(at: Indices) -> Expr:
        variance = functools.reduce(operator.add, [part.variance(at) for part in parts])
        return op("sqrt", variance) if root else variance

    first, asked = call.define(body, 0), len(call.results) > 1
    return (first, *(call.define(part.mean, 1) for part in parts if asked))


for _name, _root in (("var", False), ("std", True)):
    _packets = getattr(aten, _name), getattr(aten, f"{_name}_mean")
    reduces(*(packet.correction for packet in _packets))(partial(spread, _root))


def spread_mean(call: AtenCall, mean: Value) -> Value:
    """Return the mean as the second result: ``mean`` itself if its type and strides match."""
    kind = call.results[1]
    buffer = mean.buffer
    if buffer is not None and buffer.dtype is kind.dtype and buffer.strides == kind.strides:
        return mean
    return call.define(mean.at, 1)


# -- extremes -------------------------------------------------------------------------------------


def value_of_extreme(monoid: Monoid, call: AtenCall, x: Value, over: Region) -> Value:
    if x.dtype is BOOL:
        return quantify(ANY if monoid is MAX else ALL, call, x, over)
    return reduced(call, over, monoid, lambda p: p.read(x, compute_type(x.dtype)))


def extreme_with_place(monoid: Monoid, call: AtenCall, x: Value, over: Region) -> Any:
    """Emit each region's extreme and its row-major number; of ``argmax``, the number alone."""
    extreme = Extreme(x, over.at, monoid, product(x.shape[d] for d in over.dims))
    return extreme.define(call) if len(call.results) == 2 else call.define(extreme.place)


for _name, _monoid in (("max", MAX), ("min", MIN)):
    _packet = getattr(aten, _name)
    reduces(getattr(aten, f"a{_name}").default, _packet.default)(partial(value_of_extreme, _monoid))
    _targets = (_packet.dim, getattr(aten, f"arg{_name}").default)
    reduces(*_targets)(partial(extreme_with_place, _monoid))


def quantify(monoid: Monoid, call: AtenCall, x: Value, over: Region) -> Value:
    """Emit whether any, or all, elements of each region are true."""
    return reduced(call, over, monoid, lambda p: truth(x, p.where))


reduces(aten.any.default, aten.any.dim)(partial(quantify, ANY))


@lowers(aten.any.dims)
def any_along(
    call: AtenCall, x: Value, dims: Sequence[int] | None = None, keepdim: bool = False
) -> Value:
    """Emit whether any element is true along dimensions: without any, of each element alone."""
    if dims is not None and not dims:
        return call.define(lambda at: truth(x, at))
    return quantify(ANY, call, x, region(x, dims, keepdim))


# -- norms ----------------------------------------------------------------------------------------


@lowers(aten.linalg_vector_norm.default)
def vector_norm(
    call: AtenCall,
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
        squares = reduction(over.at, SUM, lambda p: p.read(x, kind) * p.read(x, kind))
        return call.define(lambda at: op("sqrt", squares(at)))
    if not isinstance(ord, int | float):
        raise Unsupported("a norm of symbolic order")
    powers = reduction(over.at, SUM, lambda p: op("pow", size(p), Const(ord, kind)))
    return call.define(lambda at: op("pow", powers(at), Const(1 / ord, kind)))
