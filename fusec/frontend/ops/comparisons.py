"""Comparisons, tests, logical and bitwise operations.

Comparisons are done in the common type of the arguments, 16-bit floats read exactly. Worked
example, ``x > 0.5`` of a bf16 tensor::

    gt[i0] = round_bf16(f32(x[i0])) > 0.5
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fusec.frontend.call import (
    AtenCall,
    Indices,
    Scalar,
    common_type,
    number,
    read,
    read_exact,
    result_type,
)
from fusec.frontend.ops.arithmetic import less, negate, select
from fusec.frontend.ops.registry import aten, lowers
from fusec.frontend.value import Value
from fusec.ir.dtype import BOOL, Kind, compute_type
from fusec.ir.expr import Expr, cast, op


def compare(test: Callable[..., Expr], call: AtenCall, *args: Scalar) -> Value:
    """Emit a condition on arguments that are cast to their common type.

    On CPUs, eager rounds a number compared with a 16-bit tensor to that type; on GPUs it does not.
    """
    common = result_type(args[0], args[-1])
    return call.pointwise_exact(test, *call.narrowed(*args, kind=common), kind=common_type(common))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _packet = getattr(aten, _name)
    lowers(_packet.Tensor, _packet.Scalar)(partial(compare, partial(op, _name)))


@lowers(aten.isnan.default)
def isnan(call: AtenCall, x: Value) -> Value:
    if not x.dtype.is_float:
        return call.define(lambda at: number(False, BOOL))
    return call.pointwise(lambda a: op("isnan", a), x, kind=compute_type(x.dtype))


@lowers(aten.isinf.default)
def isinf(call: AtenCall, x: Value) -> Value:
    if not x.dtype.is_float:
        return call.define(lambda at: number(False, BOOL))
    return compare(partial(op, "isinf"), call, x)


@lowers(aten.signbit.default)
def signbit(call: AtenCall, x: Value) -> Value:
    is_float = x.dtype.is_float
    return compare(lambda a: less(op("copysign", 1.0, a) if is_float else a, 0), call, x)


def truth(x: Scalar, at: Indices) -> Expr:
    """Return ``x != 0`` at an index."""
    if isinstance(x, Value):
        return cast(read_exact(x, at, compute_type(x.dtype)), BOOL)
    return read(x, at, BOOL)


lowers(aten.logical_not.default)(lambda call, x: call.define(lambda at: negate(truth(x, at))))


def logical(name: str, call: AtenCall, x: Value, y: Value) -> Value:
    """Emit a logical operation on truth values."""
    return call.define(lambda at: op(name, truth(x, at), truth(y, at)))


def bitwise(name: str, call: AtenCall, *args: Scalar) -> Value:
    """Emit a bitwise operation; on bool it is the logical one."""
    return call.pointwise(partial(op, name), *args, kind=compute_type(call.out.dtype))


for _name in ("and", "or", "xor"):
    lowers(getattr(aten, f"logical_{_name}").default)(partial(logical, _name))
    _packet = getattr(aten, f"bitwise_{_name}")
    lowers(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor)(partial(bitwise, _name))
lowers(aten.bitwise_not.default)(partial(bitwise, "not"))


def shift(name: str, call: AtenCall, x: Scalar, y: Scalar) -> Value:
    """Emit a shift to the left or right; by a negative number, or by the width or more, it gives 0.

    To the right it gives all sign bits then, if the type has a sign.
    """
    bits = call.out.dtype.itemsize * 8
    last = bits if call.out.dtype.kind is Kind.UNSIGNED else bits - 1  # computed in a wider type

    def shifted(a: Expr, b: Expr) -> Expr:
        known = op("ge", b, 0) & less(b, bits)
        if name == "left":
            return select(known, op("shl", a, b), 0)
        return op("shr", a, select(known, b, last))

    return call.pointwise(shifted, x, y)


for _name in ("left", "right"):
    _packet, _sign = getattr(aten, f"bitwise_{_name}_shift"), getattr(aten, f"__{_name[0]}shift__")
    _targets = (_packet.Tensor, _packet.Tensor_Scalar, _packet.Scalar_Tensor)
    lowers(*_targets, _sign.Tensor, _sign.Scalar)(partial(shift, _name))
