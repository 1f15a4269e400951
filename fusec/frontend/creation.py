"""Tensors made from nothing: constants and ranges. Values; nothing is emitted until needed."""

from __future__ import annotations

from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.arithmetic import add, mul
from fusec.frontend.call import Call, Scalar, read, round_number
from fusec.frontend.registry import lowers
from fusec.frontend.value import Value
from fusec.ir.dtype import F32, F64, compute_type
from fusec.ir.expr import Expr, IndexValue, cast, op
from fusec.ir.index import Index, index
from fusec.ir.scalar import ROUND

aten = torch.ops.aten
prims = torch.ops.prims


def constant(call: Call, value: Scalar) -> Value:
    """Return a tensor of one number, rounded to its type."""
    if isinstance(value, Value):
        raise Unsupported("a number read from memory")
    dtype = call.out.dtype
    if dtype in ROUND and isinstance(value, int | float):
        value = round_number(float(value), dtype)
    return call.lazy(lambda at: read(value, (), compute_type(dtype)))


@lowers(aten.full.default, aten.new_full.default, aten.full_like.default)
def full(call: Call, like: Any, *args: Any, **_: Any) -> Value:
    return constant(call, args[-1])


@lowers(aten.scalar_tensor.default)
def scalar_tensor(call: Call, value: Scalar, **_: Any) -> Value:
    return constant(call, value)


@lowers(aten.fill.Scalar)
def fill(call: Call, x: Value, value: Scalar) -> Value:
    return constant(call, value)


@lowers(aten.fill.Tensor)
def fill_from(call: Call, x: Value, value: Value) -> Value:
    return call.define(lambda at: cast(cast(value.at(()), compute_type(x.dtype)), x.dtype))


@lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.zero.default,
    aten._efficientzerotensor.default,
)
def zeros(call: Call, *_: Any, **__: Any) -> Value:
    return constant(call, 0)


@lowers(
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
)
def empty(call: Call, *_: Any, **__: Any) -> Value:
    """Anything, so 0: no memory, where all of it is replaced before it is read."""
    return constant(call, 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(call: Call, *_: Any, **__: Any) -> Value:
    return constant(call, 1)


@lowers(aten.arange.default)
def arange(call: Call, end: Scalar, **_: Any) -> Value:
    return arange_step(call, 0, end)


@lowers(aten.arange.start)
def arange_start(call: Call, start: Scalar, end: Scalar, **_: Any) -> Value:
    return arange_step(call, start, end)


@lowers(aten.arange.start_step)
def arange_step(call: Call, start: Scalar, end: Scalar, step: Scalar = 1, **_: Any) -> Value:
    """start + step * i, in integers where both are, else in floats."""
    if isinstance(start, int | Index) and isinstance(step, int | Index):
        first, stride = index(start), index(step)
        return call.lazy(lambda at: IndexValue(first + stride * at[0]))
    if not call.out.dtype.is_float:
        raise Unsupported("a range of integers with a fractional step")
    kind = F64 if call.out.dtype is F64 else F32

    def body(at: tuple[Index, ...]) -> Expr:
        steps = mul(cast(IndexValue(at[0]), kind), read(step, (), kind))
        return add(read(start, (), kind), steps)

    return call.lazy(body)


@lowers(prims.iota.default)
def iota(call: Call, length: Scalar, *, start: Scalar, step: Scalar, **_: Any) -> Value:
    return arange_step(call, start, length, step)


@lowers(aten.eye.default, aten.eye.m)
def eye(call: Call, *_: Any, **__: Any) -> Value:
    dtype = call.out.dtype
    kind = compute_type(dtype)
    return call.lazy(lambda at: cast(op("eq", IndexValue(at[0]), IndexValue(at[1])), kind))
