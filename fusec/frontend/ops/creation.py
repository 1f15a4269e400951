"""Tensors without tensor operands: constants and ranges, as values that emit no definition."""

from __future__ import annotations

import math
from typing import Any

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Scalar, arithmetic_type, number, read, round_number
from fusec.frontend.ops.registry import aten, lowers, prims
from fusec.frontend.value import Value
from fusec.ir.dtype import F32, F64, compute_type
from fusec.ir.expr import Expr, IndexValue, cast
from fusec.ir.index import Index, index
from fusec.ir.scalar import ROUND

_LARGEST = 1 << 30
"""The largest integer of a range that is counted in 64 bits, whatever its length."""


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
    """Return ``start + step * i``, in integers if it is one divided by a power of two.

    Otherwise in the type that eager's kernel computes in: on CPUs f64 for results of f32.
    """
    kind = arithmetic_type(call.out.dtype)
    parts: tuple[Index, Index, int] | None
    if isinstance(start, int | Index) and isinstance(step, int | Index):
        parts = index(start), index(step), 1
    elif not call.out.dtype.is_float:
        raise Unsupported("a range of integers with a fractional step")
    else:
        parts = _as_integers(start, step)
    if parts is not None:
        first, stride, divisor = parts
        scale = number(1 / divisor, kind) if divisor > 1 else None

        def exact(at: tuple[Index, ...]) -> Expr:
            position = IndexValue(first + stride * at[0])
            return position if scale is None else cast(position, kind) * scale

        return call.lazy(exact)
    wide = F64 if call.is_cpu and call.out.dtype is F32 else kind

    def body(at: tuple[Index, ...]) -> Expr:
        steps = cast(IndexValue(at[0]), wide) * read(step, (), wide)
        return read(start, (), wide) + steps

    return call.lazy(body)


def _as_integers(start: Scalar, step: Scalar) -> tuple[Index, Index, int] | None:
    """Return two numbers as integers divided by a power of two, or None if such are not small.

    A product with a position then fits in 64 bits. A start of -0.0 is no integer.
    """
    ratios: list[tuple[Index, int]] = []
    for value in (start, step):
        match value:
            case float() if math.isfinite(value) and (value or math.copysign(1, value) > 0):
                numerator, divisor = value.as_integer_ratio()
                ratios.append((index(numerator), divisor))
            case int() | Index():
                ratios.append((index(value), 1))
            case _:
                return None
    divisor = max(divisor for _, divisor in ratios)
    first, stride = (whole * (divisor // own) for whole, own in ratios)
    small = all(abs(whole.const) <= _LARGEST for whole in (first, stride))
    known = divisor == 1 or (first.is_constant and stride.is_constant)
    return (first, stride, divisor) if small and known and divisor <= _LARGEST else None


@lowers(prims.iota.default)
def iota(call: AtenCall, length: Scalar, *, start: Scalar, step: Scalar, **_: Any) -> Value:
    return arange_step(call, start, length, step)
