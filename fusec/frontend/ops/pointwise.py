"""Elementwise operations: arithmetic, functions, choices, conversions.

Each is computed in the arithmetic type of its result (``call.py`` says which). Discontinuous ones
read 16-bit floats exactly. Worked example, ``add(x, y, alpha=2)`` of bf16 tensors::

    add[i0] = bf16(f32(x[i0]) + f32(y[i0]) * 2.0)
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices, Scalar, common_type, read, read_exact
from fusec.frontend.ops.arithmetic import equal, greater, integer_power, less, like, select
from fusec.frontend.ops.comparisons import truth
from fusec.frontend.ops.registry import aten, computes, defines, lowers, prims
from fusec.frontend.value import Value, broadcast
from fusec.ir.dtype import F8E4M3FN, F16, F32, F64, DType, compute_type
from fusec.ir.expr import Const, Expr, cast, op
from fusec.ir.scalar import ROUND
from fusec.torch_interior import running_plainly


def elementwise(compute: Callable[..., Expr], call: AtenCall, *args: Scalar) -> Value:
    """Emit a function of the arguments' elements."""
    return call.pointwise(compute, *call.narrowed(*args))


_FUNCTIONS = (
    *("sqrt", "rsqrt", "reciprocal", "abs", "neg", "sigmoid", "erf", "erfc", "erfinv", "lgamma"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
    *("sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)

for _name in _FUNCTIONS:
    lowers(getattr(aten, _name).default)(partial(elementwise, partial(op, _name)))


# -- sums, products, quotients --------------------------------------------------------------------


def plus(
    compute: Callable[..., Expr], call: AtenCall, x: Scalar, y: Scalar, *, alpha: Scalar = 1
) -> Value:
    """Emit a sum, or a difference, with a multiple of the second operand."""
    return call.pointwise(lambda a, b, k: compute(a, b * k), *call.narrowed(x, y, alpha))


def is_one(x: Scalar) -> bool:
    return isinstance(x, int | float) and x == 1


def is_same_type(call: AtenCall, x: Scalar) -> bool:
    return isinstance(x, Value) and x.dtype is call.out.dtype and x.shape == call.out.shape


def scaled(compute: Callable[..., Expr], call: AtenCall, x: Value, y: Scalar) -> Value:
    """Emit a product or a quotient; ``x`` itself if the other operand is one."""
    if is_one(y) and is_same_type(call, x):
        return x
    return call.pointwise(compute, x, y)


for _name, _rule in {
    "add": partial(plus, operator.add),
    "sub": partial(plus, operator.sub),
    "mul": partial(scaled, operator.mul),
    "div": partial(scaled, operator.truediv),
}.items():
    lowers(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(_rule)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide_rounded(call: AtenCall, x: Value, y: Scalar, *, rounding_mode: str | None) -> Value:
    if rounding_mode is None:
        return scaled(operator.truediv, call, x, y)
    if rounding_mode == "floor":
        return floor_divide(call, x, y)
    if call.out.dtype.is_float:
        return call.pointwise_exact(lambda a, b: op("trunc", a / b), x, y)
    return call.pointwise(lambda a, b: op("truncdiv", a, divisor(call, b)), x, y)


def floor_divide(call: AtenCall, x: Scalar, y: Scalar) -> Value:
    if call.out.dtype.is_float:
        return call.pointwise_exact(floor_quotient, x, y)
    return call.pointwise(lambda a, b: op("floordiv", a, divisor(call, b)), x, y)


def divisor(call: AtenCall, b: Expr) -> Expr:
    """Return a divisor with the check that eager has on CPUs, where an integer zero is an error."""
    known = isinstance(b, Const) and b.value != 0
    return b if known or b.dtype.is_float or not call.is_cpu else op("nonzero", b)


def floor_quotient(a: Expr, b: Expr) -> Expr:
    """Return floor(a / b) of floats as torch does: from the exact remainder, not the quotient."""
    rest = op("fmod", a, b)
    quotient = (a - rest) / b
    other_sign = op("xor", less(b, 0.0), less(rest, 0.0))
    crossed = op("ne", rest, 0.0) & other_sign
    quotient = select(crossed, quotient - 1.0, quotient)
    floored = op("floor", quotient)
    floored = select(greater(quotient - floored, 0.5), floored + 1.0, floored)
    exact = a / b
    signed_zero = op("copysign", 0.0, exact)
    nonzero = select(equal(quotient, 0.0), signed_zero, floored)
    return select(equal(b, 0.0), exact, nonzero)


def remainder(name: str, call: AtenCall, x: Scalar, y: Scalar) -> Value:
    operands = call.narrowed(x, y)
    return call.pointwise_exact(lambda a, b: op(name, a, divisor(call, b)), *operands)


lowers(aten.fmod.Tensor, aten.fmod.Scalar)(partial(remainder, "fmod"))
lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)(
    partial(remainder, "remainder")
)


# -- powers ---------------------------------------------------------------------------------------


@lowers(aten.pow.Tensor_Scalar)
def power_of_tensor(call: AtenCall, x: Value, exponent: Scalar) -> Value:
    if isinstance(exponent, bool) or not isinstance(exponent, int | float):
        return power(call, x, exponent)
    if is_one(exponent) and is_same_type(call, x):
        return x
    if not call.out.dtype.is_float:
        if exponent != int(exponent):
            raise Unsupported("an integer to a fractional power")
        return call.pointwise(lambda a: integer_power(a, int(exponent)), x)
    rule = _POWERS.get(float(exponent))
    root = exponent in (0.5, -0.5)  # on CPUs eager calls pow for f16: -inf gives inf
    if rule is None or (root and call.is_cpu and call.out.dtype is F16):
        return power(call, x, exponent)
    return call.pointwise(rule, x)


_POWERS: dict[float, Callable[[Expr], Expr]] = {
    0.0: lambda a: like(1, a),
    1.0: lambda a: a,
    2.0: lambda a: a * a,
    3.0: lambda a: a * a * a,
    4.0: lambda a: integer_power(a, 4),
    0.5: lambda a: op("sqrt", a),
    -0.5: lambda a: op("rsqrt", a),
    -1.0: lambda a: op("reciprocal", a),
    -2.0: lambda a: op("reciprocal", a * a),
}


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(call: AtenCall, x: Scalar, exponent: Scalar) -> Value:
    if not call.out.dtype.is_float:
        raise Unsupported("an integer to the power of a tensor")
    if isinstance(x, int | float) and x == 2:
        return call.pointwise(lambda b: op("exp2", b), exponent)
    return call.pointwise(lambda a, b: op("pow", a, b), *call.narrowed(x, exponent))


# -- other functions of two and more --------------------------------------------------------------


for _name in ("maximum", "minimum", "atan2", "hypot"):
    lowers(getattr(aten, _name).default)(partial(elementwise, partial(op, _name)))
lowers(aten.copysign.Tensor, aten.copysign.Scalar)(partial(elementwise, partial(op, "copysign")))


@lowers(aten.nextafter.default)
def nextafter(call: AtenCall, x: Value, y: Value) -> Value:
    if call.out.dtype in ROUND:
        raise Unsupported("the neighbour of a 16-bit float, which is none of its neighbours in f32")
    return call.pointwise(lambda a, b: op("nextafter", a, b), x, y)


def ignoring_nan(name: str, a: Expr, b: Expr) -> Expr:
    """Return the maximum or minimum of two; if one is NaN, the other."""
    if not a.dtype.is_float:
        return op(name, a, b)
    return select(op("isnan", a), b, select(op("isnan", b), a, op(name, a, b)))


lowers(aten.fmax.default)(partial(elementwise, partial(ignoring_nan, "maximum")))
lowers(aten.fmin.default)(partial(elementwise, partial(ignoring_nan, "minimum")))


@defines(aten.clamp.default, aten.clamp.Tensor)
def clamp(
    call: AtenCall, at: Indices, x: Value, low: Scalar | None = None, high: Scalar | None = None
) -> Expr:
    kind = common_type(call.out.dtype)
    value = read(x, at, kind)
    if low is not None:
        value = op("maximum", value, read(low, at, kind))
    return value if high is None else op("minimum", value, read(high, at, kind))


@lowers(aten.addcmul.default)
def addcmul(call: AtenCall, x: Value, a: Value, b: Value, *, value: Scalar = 1) -> Value:
    return call.pointwise(lambda x, a, b, k: x + k * a * b, x, a, b, value)


@computes("prims.fma.default")
def multiply_add(a: Expr, b: Expr, c: Expr) -> Expr:
    """Return Dynamo's form of ``addcmul_``; compilers contract it to one rounding."""
    return a * b + c


# -- steps ----------------------------------------------------------------------------------------


def step(name: str, call: AtenCall, x: Value) -> Value:
    """Emit a rounding, which is discontinuous; integers are copied."""
    return call.pointwise_exact(partial(op, name), x) if x.dtype.is_float else clone(call, x)


for _name in ("floor", "ceil", "trunc", "round"):
    lowers(getattr(aten, _name).default)(partial(step, _name))


@lowers(aten.round.decimals)
def round_decimals(call: AtenCall, x: Value, *, decimals: int) -> Value:
    places = abs(decimals)
    scale = 10.0**places if places <= sys.float_info.max_10_exp else math.inf
    if not x.dtype.is_float:
        raise Unsupported("rounding of integers to decimals")

    def rounded(a: Expr) -> Expr:
        if decimals < 0:
            return op("round", a / scale) * scale
        return op("round", a * scale) / scale

    return call.pointwise_exact(rounded, x)


lowers(aten.sign.default)(lambda call, x: call.pointwise_exact(partial(op, "sign"), x))


@lowers(aten.angle.default)
def angle(call: AtenCall, x: Value) -> Value:
    """Emit pi for negative numbers, NaN for NaN, and 0 for others."""

    def turned(a: Expr) -> Expr:
        half = select(less(a, 0), like(math.pi, a), 0)
        return select(op("isnan", a), a, half)

    return call.pointwise_exact(turned, x)


# -- choices --------------------------------------------------------------------------------------


@defines(aten.where.self, prims.where.default)
def where(call: AtenCall, at: Indices, condition: Value, x: Scalar, y: Scalar) -> Expr:
    kind = compute_type(call.out.dtype)
    return select(truth(condition, at), read(x, at, kind), read(y, at, kind))


# -- conversions and copies -----------------------------------------------------------------------


@lowers(aten.clone.default)
def clone(call: AtenCall, x: Value, *, memory_format: Any = None) -> Value:
    return call.define(x.at)


@lowers(aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default)
def convert(call: AtenCall, x: Scalar, *_: Any, **__: Any) -> Value:
    """Emit a conversion that the program requests: its rounding is never dropped."""
    if not isinstance(x, Value):  # torch.vmap converts a number beside a batch
        return call.pointwise(lambda number: number, x, kind=call.out.dtype)
    return call.define(lambda at: stored_exactly(x, at, call.out.dtype))


def stored_exactly(x: Value, at: Indices, target: DType) -> Expr:
    """Return an element of ``x`` as ``target``, rounded even if it is never stored."""
    value = x.at(at)
    if x.dtype is target:
        return value
    if target in ROUND:
        value = read_exact(x, at, F32) if x.dtype in ROUND else cast(value, F32)
        return cast(rounded(value, target), target)
    if x.dtype in ROUND and not target.is_float:
        return cast(read_exact(x, at, F32), target)
    if x.dtype is F64 and target is F32:
        return cast(value, F32)
    return cast(value, target)


def rounded(value: Expr, target: DType, saturates: bool | None = None) -> Expr:
    """Return the nearest number of a type of fewer than 32 bits, as eager rounds an f32 to it.

    Args:
        saturates: whether ``float8_e4m3fn``, without infinities, has its largest number for what is
            too large, or NaN; by default as in eager's conversion.
    """
    nearest = op(ROUND[target], value)
    if target is F8E4M3FN and not (_saturates() if saturates is None else saturates):
        too_large = greater(op("abs", value), 464.0)  # halfway to 480, whose code is NaN's
        return select(too_large, math.nan, nearest)
    return nearest


@functools.cache
def _saturates() -> bool:
    """Return True if eager converts what is too large for ``float8_e4m3fn`` to its largest number.

    So it does from torch 2.13 on; before that to NaN.
    """
    with running_plainly():
        return bool(torch.tensor(1e9).to(torch.float8_e4m3fn).float().isfinite())


@lowers(aten.copy.default)
def copy(call: AtenCall, x: Value, source: Value, *_: Any) -> Value:
    """Emit ``source``, broadcast and converted to the type of ``x``."""
    target = call.out.dtype
    spread = source
    if source.shape != call.out.shape:
        spread = call.view(source, lambda at: broadcast(at, source.shape))
    return call.define(lambda at: stored_exactly(spread, at, target))
