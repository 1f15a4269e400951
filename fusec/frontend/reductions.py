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
from fusec.frontend.arithmetic import (
    add,
    div,
    equal,
    like,
    select,
    sub,
)
from fusec.frontend.call import Call, Indices, Scalar, read_exact
from fusec.frontend.comparisons import truth
from fusec.frontend.registry import lowers
from fusec.frontend.value import ONE, ZERO, Value
from fusec.frontend.views import wrap
from fusec.ir.dtype import BOOL, F32, I64, DType, accumulate_type, compute_type
from fusec.ir.expr import Const, Expr, IndexValue, Reduce, cast, op
from fusec.ir.index import Axis, Index, contiguous_strides, index, product
from fusec.ir.monoid import ALL, ANY, MAX, MIN, PROD, SUM, Monoid

aten = torch.ops.aten

Dims = "Sequence[int] | int | None"
_LAST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Region:
    """The reduced dimensions of one tensor, and whether the result keeps them with extent 1."""

    x: Value
    dims: tuple[int, ...]
    keepdim: bool

    @property
    def shape(self) -> Indices:
        """The shape of the result."""
        kept = [ONE if d in self.dims else e for d, e in enumerate(self.x.shape)]
        if self.keepdim:
            return tuple(kept)
        return tuple(e for d, e in enumerate(kept) if d not in self.dims)

    def count(self, kind: DType) -> Expr:
        """Return the number of elements that one result combines."""
        total = product(self.x.shape[d] for d in self.dims)
        return cast(IndexValue(total), kind) if total.terms else Const(total.const, kind)

    def axes(self) -> tuple[Axis, ...]:
        """Return fresh axes to reduce over; dimensions of one element need none."""
        return tuple(
            Axis(f"r{d}", self.x.shape[d]) for d in self.dims if self.x.shape[d] is not ONE
        )

    def where(self, at: Indices, axes: tuple[Axis, ...]) -> Indices:
        """Return the indices into the tensor, from those of the result and the reduced axes."""
        reduced, kept = iter(axes), iter(at)
        full: list[Index] = []
        for d, extent in enumerate(self.x.shape):
            if d not in self.dims:
                full.append(next(kept))
                continue
            if self.keepdim:
                next(kept)
            full.append(ZERO if extent is ONE else index(next(reduced)))
        return tuple(full)

    def reduce(self, monoid: Monoid, at: Indices, body: Callable[[Indices], Expr]) -> Expr:
        """Return the reduction of ``body(indices into the tensor)`` for one result."""
        axes = self.axes()
        inner = body(self.where(at, axes))
        return Reduce(monoid, axes, inner) if axes else inner


def region(x: Value, dims: Sequence[int] | int | None, keepdim: bool) -> Region:
    """Return the reduced region; no dimensions, or None, means all of them.

    Raises:
        Unsupported: if it has no elements.
    """
    rank = len(x.shape)
    if isinstance(dims, int):
        dims = (dims,)
    named = {wrap(d, rank) for d in dims} if dims else set(range(rank))
    chosen = sorted(named) if rank else []
    if any(x.shape[d].is_constant and x.shape[d].const == 0 for d in chosen):
        raise Unsupported("an empty tensor")
    return Region(x, tuple(chosen), keepdim)


# -- sums and products ----------------------------------------------------------------------------


@lowers(aten.sum.default, aten.sum.dim_IntList)
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
    over = region(x, dims, keepdim)
    kind = I64 if call.out.dtype is BOOL else accumulate_type(call.out.dtype)
    exact = not kind.is_float and x.dtype.is_float
    read_x = (lambda at: cast(read_exact(x, at, F32), kind)) if exact else reader(x, kind)
    return call.define(lambda at: over.reduce(monoid, at, read_x))


def reader(x: Value, kind: DType) -> Callable[[Indices], Expr]:
    return lambda at: cast(x.at(at), kind)


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
    return call.define(mean_of(over, compute_type(call.out.dtype)))


def mean_of(over: Region, kind: DType) -> Callable[[Indices], Expr]:
    """Return the mean of a region as a function of the result's indices."""
    body = reader(over.x, kind)
    return lambda at: div(over.reduce(SUM, at, body), over.count(kind))


@lowers(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(call: Call, x: Value, dims: Sequence[int] | int | None = None) -> Value:
    over = region(x, dims, False)
    return call.define(lambda at: over.reduce(SUM, at, lambda i: cast(truth(x, i), I64)))


# -- variances ------------------------------------------------------------------------------------


def variance(
    call: Call, x: Value, dims: Sequence[int] | None, correction: Scalar | None, keepdim: bool
) -> tuple[Region, Value, Callable[[Indices], Expr]]:
    """Emit the mean and return it with the variance as a function of the result's indices.

    Two passes: the mean, then the sum of squares about it.
    """
    if correction is None:
        correction = 1
    if not isinstance(correction, int | float):
        raise Unsupported("a symbolic correction")
    over = region(x, dims, keepdim)
    kind = compute_type(call.out.dtype)
    mean = call.scratch("mean", over.shape, kind, mean_of(over, kind))
    freedom = correction

    def body(at: Indices) -> Expr:
        center = mean.at(at)

        def square(i: Indices) -> Expr:
            centered = sub(cast(x.at(i), kind), center)
            return op("mul", centered, centered)

        count = over.count(kind)
        divisor = sub(count, freedom) if freedom else count
        if isinstance(count, Const):
            divisor = Const(max(count.value - freedom, 0), kind)
        else:
            divisor = op("maximum", divisor, like(0.0, divisor))
        return div(over.reduce(SUM, at, square), divisor)

    return over, mean, body


@lowers(aten.var.correction)
def var(
    call: Call,
    x: Value,
    dim: Sequence[int] | None = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> Value:
    return call.define(variance(call, x, dim, correction, keepdim)[2])


@lowers(aten.std.correction)
def std(
    call: Call,
    x: Value,
    dim: Sequence[int] | None = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> Value:
    _, _, body = variance(call, x, dim, correction, keepdim)
    return call.define(lambda at: op("sqrt", body(at)))


@lowers(aten.var_mean.correction)
def var_mean(
    call: Call,
    x: Value,
    dim: Sequence[int] | None = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    _, mean, body = variance(call, x, dim, correction, keepdim)
    return call.define(body, 0), spread_mean(call, mean)


def spread_mean(call: Call, mean: Value) -> Value:
    """Return the mean as the second result: itself if its type and layout are right already."""
    kind = call.results[1]
    buffer = mean.buffer
    if buffer is not None and buffer.dtype is kind.dtype and buffer.strides == kind.strides:
        return mean
    return call.define(mean.at, 1)


# -- extremes -------------------------------------------------------------------------------------


def extreme(x: Value, monoid: Monoid) -> tuple[Monoid, DType]:
    """Return the monoid and type for the extreme of ``x``; of bools it is any or all."""
    if x.dtype is BOOL:
        return (ANY if monoid is MAX else ALL), BOOL
    return monoid, compute_type(x.dtype)


def extreme_dims(
    call: Call, x: Value, dims: Sequence[int] | int | None, keepdim: bool, monoid: Monoid
) -> Value:
    over = region(x, dims, keepdim)
    combine, kind = extreme(x, monoid)
    return call.define(lambda at: over.reduce(combine, at, reader(x, kind)))


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


@lowers(aten.max.dim)
def max_dim(call: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return extreme_with_index(call, x, dim, keepdim, MAX)


@lowers(aten.min.dim)
def min_dim(call: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return extreme_with_index(call, x, dim, keepdim, MIN)


def extreme_with_index(
    call: Call, x: Value, dim: int, keepdim: bool, monoid: Monoid
) -> tuple[Value, Value]:
    over = region(x, dim, keepdim)
    values = call.define(best_of(over, monoid), 0)
    return values, call.define(first_index(over, values), 1)


def best_of(over: Region, monoid: Monoid) -> Callable[[Indices], Expr]:
    """Return the extreme of 16-bit floats as they are stored, so that it can be found again."""
    combine, kind = extreme(over.x, monoid)
    return lambda at: over.reduce(combine, at, lambda i: read_exact(over.x, i, kind))


def first_index(over: Region, best: Value) -> Callable[[Indices], Expr]:
    """Return the least row-major index in the region of an element that is the best, or NaN."""
    x = over.x
    _, kind = extreme(x, MAX)
    steps = contiguous_strides(tuple(x.shape[d] for d in over.dims))

    def body(at: Indices) -> Expr:
        extremum = cast(best.at(at), kind)

        def candidate(i: Indices) -> Expr:
            value = read_exact(x, i, kind)
            found = equal(value, extremum)
            if kind.is_float:
                found = op("or", found, op("isnan", value))
            place = ZERO
            for d, step in zip(over.dims, steps, strict=True):
                place = place + i[d] * step
            return select(found, IndexValue(place), Const(_LAST, I64))

        return over.reduce(MIN, at, candidate)

    return body


@lowers(aten.argmax.default)
def argmax(call: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return argument_of_extreme(call, x, dim, keepdim, MAX)


@lowers(aten.argmin.default)
def argmin(call: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return argument_of_extreme(call, x, dim, keepdim, MIN)


def argument_of_extreme(
    call: Call, x: Value, dim: int | None, keepdim: bool, monoid: Monoid
) -> Value:
    over = region(x, dim, keepdim)
    best = call.scratch("best", over.shape, compute_type(x.dtype), best_of(over, monoid))
    return call.define(first_index(over, best))


# -- truth ----------------------------------------------------------------------------------------


def quantify(
    call: Call, x: Value, dims: Sequence[int] | int | None, keepdim: bool, monoid: Monoid
) -> Value:
    over = region(x, dims, keepdim)
    return call.define(lambda at: over.reduce(monoid, at, lambda i: truth(x, i)))


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def any_of(
    call: Call, x: Value, dims: Sequence[int] | int | None = None, keepdim: bool = False
) -> Value:
    return quantify(call, x, dims, keepdim, ANY)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def all_of(
    call: Call, x: Value, dims: Sequence[int] | int | None = None, keepdim: bool = False
) -> Value:
    return quantify(call, x, dims, keepdim, ALL)


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

    def size(i: Indices) -> Expr:
        return op("abs", cast(x.at(i), kind))

    if ord == math.inf:
        return call.define(lambda at: over.reduce(MAX, at, size))
    if ord == -math.inf:
        return call.define(lambda at: over.reduce(MIN, at, size))
    if ord == 0:
        return call.define(lambda at: over.reduce(SUM, at, lambda i: cast(truth(x, i), kind)))
    if ord == 1:
        return call.define(lambda at: over.reduce(SUM, at, size))
    if not isinstance(ord, int | float):
        raise Unsupported("a norm of symbolic order")
    if ord != 2:
        return call.define(
            lambda at: op(
                "pow",
                over.reduce(SUM, at, lambda i: op("pow", size(i), Const(ord, kind))),
                Const(1 / ord, kind),
            )
        )

    def square(i: Indices) -> Expr:
        value = cast(x.at(i), kind)
        return op("mul", value, value)

    return call.define(lambda at: op("sqrt", over.reduce(SUM, at, square)))


@lowers(aten.logsumexp.default)
def logsumexp(call: Call, x: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
    over = region(x, dims, keepdim)
    kind = compute_type(call.out.dtype)
    top = call.scratch(
        "max", over.shape, kind, lambda at: finite(over.reduce(MAX, at, reader(x, kind)))
    )

    def body(at: Indices) -> Expr:
        shift = top.at(at)
        total = over.reduce(SUM, at, lambda i: op("exp", sub(cast(x.at(i), kind), shift)))
        return add(op("log", total), shift)

    return call.define(body)


def finite(value: Expr) -> Expr:
    """Return 0 for an infinite maximum, from which nothing can be subtracted."""
    return select(op("isinf", value), like(0.0, value), value)


@lowers(aten._softmax.default)
def softmax(call: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    over, top, total, kind = normaliser(call, x, dim)
    steps = drop(over)
    return call.define(
        lambda at: div(op("exp", sub(cast(x.at(at), kind), top.at(steps(at)))), total.at(steps(at)))
    )


@lowers(aten._log_softmax.default)
def log_softmax(call: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    over, top, total, kind = normaliser(call, x, dim)
    steps = drop(over)
    return call.define(
        lambda at: sub(sub(cast(x.at(at), kind), top.at(steps(at))), op("log", total.at(steps(at))))
    )


def normaliser(call: Call, x: Value, dim: int) -> tuple[Region, Value, Value, DType]:
    """Emit the maximum along ``dim`` and the sum of exponentials relative to it."""
    over = region(x, dim, False)
    kind = compute_type(call.out.dtype)
    top = call.scratch("max", over.shape, kind, lambda at: over.reduce(MAX, at, reader(x, kind)))

    def sum_of_exponentials(at: Indices) -> Expr:
        shift = top.at(at)
        return over.reduce(SUM, at, lambda i: op("exp", sub(cast(x.at(i), kind), shift)))

    return over, top, call.scratch("sum", over.shape, kind, sum_of_exponentials), kind


def drop(over: Region) -> Callable[[Indices], Indices]:
    """Return the map from the tensor's indices to those of the result."""
    return lambda at: tuple(i for d, i in enumerate(at) if d not in over.dims)
