"""Activation functions and their gradients, as one expression each.

Most are decomposed into the operations of ``pointwise.py`` before lowering; these are the ones that
the core set, or ``decompositions.py``, keeps whole. Formulas follow PyTorch's kernels, so that
special values (infinities, the breakpoints of piecewise functions) agree.
"""

from __future__ import annotations

import math

from fusec.frontend.call import AtenCall, Indices, Scalar, read, read_exact
from fusec.frontend.ops.arithmetic import greater, select
from fusec.frontend.ops.registry import aten, computes, defines, lowers
from fusec.frontend.value import Value
from fusec.ir.dtype import compute_type
from fusec.ir.expr import Expr, op

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


# -- GELU -----------------------------------------------------------------------------------------


@lowers(aten.gelu.default)
def gelu(call: AtenCall, x: Value, *, approximate: str = "none") -> Value:
    def curve(a: Expr) -> Expr:
        by_tanh = approximate == "tanh"
        return a * 0.5 * (op("tanh", tanh_argument(a)) + 1.0) if by_tanh else a * op("ndtr", a)

    return call.pointwise(curve, x)


def tanh_argument(x: Expr) -> Expr:
    return (x + x * x * x * _TANH_CUBE) * _TANH_SCALE


@lowers(aten.gelu_backward.default)
def gelu_backward(call: AtenCall, grad: Value, x: Value, *, approximate: str = "none") -> Value:
    slope = gelu_tanh_slope if approximate == "tanh" else gelu_erf_slope
    return call.pointwise(lambda g, a: g * slope(a), grad, x)


def gelu_erf_slope(x: Expr) -> Expr:
    density = op("exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return op("ndtr", x) + x * density


def gelu_tanh_slope(x: Expr) -> Expr:
    t = op("tanh", tanh_argument(x))
    inner = (x * x * (3 * _TANH_CUBE) + 1.0) * _TANH_SCALE
    curve = (1.0 - t * t) * inner
    return (t + 1.0) * 0.5 + x * 0.5 * curve


# -- sigmoids, piecewise linear -------------------------------------------------------------------


@computes(aten.silu.default)
def silu(a: Expr) -> Expr:
    return a * op("sigmoid", a)


@computes(aten.silu_backward.default)
def silu_backward(g: Expr, a: Expr) -> Expr:
    s = op("sigmoid", a)
    return g * (s * (a * (1.0 - s) + 1.0))


@computes(aten.relu.default)
def relu(a: Expr) -> Expr:
    return op("maximum", a, 0)


@computes(aten.leaky_relu.default)
def leaky_relu(a: Expr, slope: Expr | float = 0.01) -> Expr:
    return select(greater(a, 0), a, a * slope)


@computes(aten.hardtanh.default)
def hardtanh(a: Expr, low: Expr | float = -1, high: Expr | float = 1) -> Expr:
    return op("minimum", op("maximum", a, low), high)


@defines(aten.threshold_backward.default)
def threshold_backward(call: AtenCall, at: Indices, grad: Value, x: Value, limit: Scalar) -> Expr:
    """Return ``grad`` where ``x``, read exactly, is above the limit or NaN, and 0 elsewhere."""
    kind = compute_type(call.out.dtype)
    edge = read(limit, (), kind)
    return select(op("le", read_exact(x, at, kind), edge), 0, read(grad, at, kind))
