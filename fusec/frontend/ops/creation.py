"""Tensors without tensor operands: constants and ranges, as values that emit no definition."""

from __future__ import annotations

from typing import Any

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Scalar, read, round_number
from fusec.frontend.ops.registry import aten, lowers, prims
from fusec.frontend.value import Value
from fusec.ir.dtype import F32, F64, compute_type
from fusec.ir.expr import Expr, IndexValue, cast
from fusec.ir.index import Index, index
from fusec.ir.scalar import ROUND


def constant(call: AtenCall, value: Scalar) -> Value:
    """Return a tensor filled with one number, rounded to the tensor's type."""
    if isinstance(value, Value):
        raise Unsupported("a number read from memory")
    dtype = call.out.dtype
    if dtype in ROUND and isinstance(value, int | float):
        value = round_number(float(value), dtype)
    return call.lazy(lambda at: read(value, (), compute_type(dtype)))


@lowers(aten.full.default, aten.full_like.default, aten.scalar_tensor.default)
def full(call: AtenCall, *args: Any, **_: Any) -> Value:
    return constant(call, args[-1])


@lowers(
    aten.new_zeros.default,
    aten._efficientzerotensor.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
)
def zeros(call: AtenCall, *_: Any, **__: Any) -> Value:
    """Return zeros, also for uninitialised tensors: a value that is never read needs no memory."""
    return constant(call, 0)


@lowers(aten.arange.start_step)
def arange_step(call: AtenCall, start: Scalar, end: Scalar, step: Scalar = 1, **_: Any) -> Value:
    """Return ``start + step * i``, in integers if both are integers, else in floats."""
    if isinstance(start, int | Index) and isinstance(step, int | Index):
        first, stride = index(start), index(step)
        return call.lazy(lambda at: IndexValue(first + stride * at[0]))
    if not call.out.dtype.is_float:
        raise Unsupported("a range of integers with a fractional step")
    kind = F64 if call.out.dtype is F64 else F32

    def body(at: tuple[Index, ...]) -> Expr:
        steps = cast(IndexValue(at[0]), kind) * read(step, (), kind)
        return read(start, (), kind) + steps

    return call.lazy(body)


@lowers(prims.iota.default)
def iota(call: AtenCall, length: Scalar, *, start: Scalar, step: Scalar, **_: Any) -> Value:
    return arange_step(call, start, length, step)
