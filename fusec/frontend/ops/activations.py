"""Activation functions and their gradients, as one expression each.

Most are decomposed into the operations of ``pointwise.py`` before lowering; these are the ones that
the core set, or ``decompositions.py``, keeps whole. Formulas follow PyTorch's kernels, so that
special values (infinities, the breakpoints of piecewise functions) agree.
"""

from __future__ import annotations

import math

import torch

from fusec.frontend.call import AtenCall, Indices, Scalar, read, read_exact
from fusec.frontend.ops.arithmetic import add, greater, like, mul, select, sub
from fusec.frontend.ops.registry import lowers
from fusec.frontend.value import Value
from fusec.ir.dtype import compute_type
from fusec.ir.expr import Expr, op

aten = torch.ops.aten

_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


# -- GELU -----------------------------------------------------------------------------------------


@lowers(aten.gelu.default)
def gelu(call: AtenCall, x: Value, *, approximate: str = "none") -> Value:
    def curve(a: Expr) -> Expr:
        by_tanh = approximate == "tanh"
        bend = op("tanh", tanh_argument(a)) if by_tanh else op("erf", mul(a, _SQRT_HALF))
        return mul(mul(a, 0.5), add(bend, 1.0))

    return call.pointwise(curve, x)


def tanh_argument(x: Expr) -> Expr:
    cubed = op("mul", op("mul", x, x), x)
    return mul(add(x, mul(cubed, _TANH_CUBE)), _TANH_SCALE)


@lowers(aten.gelu_backward.default)
def gelu_backward(call: AtenCall, grad: Value, x: Value, *, approximate: str = "none") -> Value:
    slope = gelu_tanh_slope if approximate == "tanh" else gelu_erf_slope
    return call.pointwise(lambda g, a: op("mul", g, slope(a)), grad, x)


def gelu_erf_slope(x: Expr) -> Expr:
    distribution = mul(add(op("erf", mul(x, _SQRT_HALF)), 1.0), 0.5)
    density = mul(op("exp", mul(op("mul", x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return add(distribution, op("mul", x, density))


def gelu_tanh_slope(x: Expr) -> Expr:
    t = op("tanh", tanh_argument(x))
    inner = mul(add(mul(op("mul", x, x), 3 * _TANH_CUBE), 1.0), _TANH_SCALE)
    curve = op("mul", sub(like(1.0, t), op("mul", t, t)), inner)
    return add(mul(add(t, 1.0), 0.5), op("mul", mul(x, 0.5), curve))


# -- sigmoids -------------------------------------------------------------------------------------


@lowers(aten.silu.default)
def silu(call: AtenCall, x: Value) -> Value:
    return call.pointwise(lambda a: op("mul", a, op("sigmoid", a)), x)


@lowers(aten.silu_backward.default)
def silu_backward(call: AtenCall, grad: Value, x: Value) -> Value:
    def slope(g: Expr, a: Expr) -> Expr:
        s = op("sigmoid", a)
        return op("mul", g, op("mul", s, add(op("mul", a, sub(like(1.0, s), s)), 1.0)))

    return call.pointwise(slope, grad, x)


# -- piecewise linear -----------------------------------------------------------------------------


@lowers(aten.relu.default)
def relu(call: AtenCall, x: Value) -> Value:
    return call.pointwise(lambda a: op("maximum", a, like(0, a)), x)


@lowers(aten.threshold_backward.default)
def threshold_backward(call: AtenCall, grad: Value, x: Value, limit: Scalar) -> Value:
    """Emit ``grad`` where ``x``, read exactly, is above the limit or NaN, and 0 elsewhere."""
    kind = compute_type(call.out.dtype)
    edge = read(limit, (), kind)

    def slope(at: Indices) -> Expr:
        g = read(grad, at, kind)
        return select(op("le", read_exact(x, at, kind), edge), like(0, g), g)

    return call.define(slope)


@lowers(aten.leaky_relu.default)
def leaky_relu(call: AtenCall, x: Value, negative_slope: Scalar = 0.01) -> Value:
    return call.pointwise(lambda a, k: select(greater(a, 0), a, mul(a, k)), x, negative_slope)


@lowers(aten.hardtanh.default)
def hardtanh(call: AtenCall, x: Value, low: float = -1, high: float = 1) -> Value:
    return call.pointwise(lambda a: op("minimum", op("maximum", a, like(low, a)), like(high, a)), x)
