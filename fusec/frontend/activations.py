"""Activation functions and their gradients, as one expression each.

Most arrive taken apart into the operations of ``pointwise.py``; these are for graphs traced with
another table, and for those that the core set keeps whole. Formulas follow PyTorch's kernels, so
that special values (infinities, the edges of pieces) agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fusec.errors import Unsupported
from fusec.frontend.arithmetic import add, div, greater, less, like, mul, select, sub
from fusec.frontend.call import Call, Indices, Scalar, read, read_exact
from fusec.frontend.registry import lowers
from fusec.frontend.value import Value
from fusec.frontend.views import replaced, wrap
from fusec.ir.dtype import compute_type
from fusec.ir.expr import Expr, cast, op

aten = torch.ops.aten

_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715
_SELU_SCALE = 1.0507009873554804934193349852946
_SELU_ALPHA = 1.6732632423543772848170429916717


def clip(x: Expr, low: float, high: float) -> Expr:
    """Return x within [low, high], NaN if x is."""
    return op("minimum", op("maximum", x, like(low, x)), like(high, x))


def zero_where(condition: Expr, x: Expr) -> Expr:
    return select(condition, like(0, x), x)


def gradient(call: Call, slope: Callable[[Expr, Expr], Expr], grad: Value, x: Value) -> Value:
    """Emit ``slope(gradient, x)``; x is read exactly, since the slope jumps between pieces."""
    kind = compute_type(call.out.dtype)
    return call.define(lambda at: slope(read(grad, at, kind), read_exact(x, at, kind)))


# -- GELU -----------------------------------------------------------------------------------------


@lowers(aten.gelu.default)
def gelu(call: Call, x: Value, *, approximate: str = "none") -> Value:
    return call.pointwise(gelu_tanh if approximate == "tanh" else gelu_erf, x)


def gelu_erf(x: Expr) -> Expr:
    return mul(mul(x, 0.5), add(op("erf", mul(x, _SQRT_HALF)), 1.0))


def gelu_tanh(x: Expr) -> Expr:
    return mul(mul(x, 0.5), add(op("tanh", tanh_argument(x)), 1.0))


def tanh_argument(x: Expr) -> Expr:
    cubed = op("mul", op("mul", x, x), x)
    return mul(add(x, mul(cubed, _TANH_CUBE)), _TANH_SCALE)


@lowers(aten.gelu_backward.default)
def gelu_backward(call: Call, grad: Value, x: Value, *, approximate: str = "none") -> Value:
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
def silu(call: Call, x: Value) -> Value:
    return call.pointwise(lambda a: op("mul", a, op("sigmoid", a)), x)


@lowers(aten.silu_backward.default)
def silu_backward(call: Call, grad: Value, x: Value) -> Value:
    def slope(g: Expr, a: Expr) -> Expr:
        s = op("sigmoid", a)
        return op("mul", g, op("mul", s, add(op("mul", a, sub(like(1.0, s), s)), 1.0)))

    return call.pointwise(slope, grad, x)


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(call: Call, grad: Value, y: Value) -> Value:
    return call.pointwise(lambda g, s: op("mul", g, op("mul", sub(like(1.0, s), s), s)), grad, y)


@lowers(aten.tanh_backward.default)
def tanh_backward(call: Call, grad: Value, y: Value) -> Value:
    return call.pointwise(lambda g, t: op("mul", g, sub(like(1.0, t), op("mul", t, t))), grad, y)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid(call: Call, x: Value) -> tuple[Value, Value]:
    """The second result is exp(-|x|), which the CPU's backward reads; elsewhere it is empty."""
    if call.results[1].is_empty or call.results[1].shape != call.out.shape:
        raise Unsupported("an empty tensor")
    kind = compute_type(call.out.dtype)

    def tail(at: Indices) -> Expr:
        return op("exp", op("neg", op("abs", read(x, at, kind))))

    def body(at: Indices) -> Expr:
        value = read(x, at, kind)
        return sub(op("minimum", value, like(0, value)), op("log1p", tail(at)))

    return call.define(body, 0), call.define(tail, 1)


@lowers(aten.mish.default)
def mish(call: Call, x: Value) -> Value:
    return call.pointwise(lambda a: op("mul", a, op("tanh", op("log1p", op("exp", a)))), x)


@lowers(aten.softplus.default)
def softplus(call: Call, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    def curve(a: Expr) -> Expr:
        scaled = mul(a, beta)
        bent = div(op("log1p", op("exp", scaled)), beta)
        return select(greater(scaled, threshold), a, bent)

    return call.pointwise(curve, x)


@lowers(aten.softplus_backward.default)
def softplus_backward(call: Call, grad: Value, x: Value, beta: float, threshold: float) -> Value:
    def slope(g: Expr, a: Expr) -> Expr:
        scaled = mul(a, beta)
        grown = op("exp", scaled)
        bent = div(op("mul", g, grown), add(grown, 1.0))
        return select(greater(scaled, threshold), g, bent)

    return call.pointwise(slope, grad, x)


# -- pieces of lines ------------------------------------------------------------------------------


@lowers(aten.relu.default)
def relu(call: Call, x: Value) -> Value:
    return call.pointwise(lambda a: op("maximum", a, like(0, a)), x)


@lowers(aten.relu6.default)
def relu6(call: Call, x: Value) -> Value:
    return call.pointwise(lambda a: clip(a, 0, 6), x)


@lowers(aten.leaky_relu.default)
def leaky_relu(call: Call, x: Value, negative_slope: Scalar = 0.01) -> Value:
    return call.pointwise(lambda a, k: select(greater(a, 0), a, mul(a, k)), x, negative_slope)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    call: Call, grad: Value, x: Value, negative_slope: Scalar, is_result: bool
) -> Value:
    factor = read(negative_slope, (), compute_type(call.out.dtype))
    return gradient(call, lambda g, a: select(greater(a, 0), g, mul(g, factor)), grad, x)


@lowers(aten._prelu_kernel.default, aten.prelu.default)
def prelu(call: Call, x: Value, weight: Value) -> Value:
    if len(weight.shape) != len(x.shape):
        raise Unsupported("weights by channel")
    return call.pointwise(lambda a, w: select(greater(a, 0), a, op("mul", w, a)), x, weight)


@lowers(aten.threshold.default)
def threshold(call: Call, x: Value, limit: Scalar, value: Scalar) -> Value:
    return call.pointwise_exact(lambda a, low, v: select(op("le", a, low), v, a), x, limit, value)


@lowers(aten.threshold_backward.default)
def threshold_backward(call: Call, grad: Value, x: Value, limit: Scalar) -> Value:
    """The gradient where ``x`` is above the limit, or is NaN."""
    edge = read(limit, (), compute_type(call.out.dtype))
    return gradient(call, lambda g, a: zero_where(op("le", a, edge), g), grad, x)


@lowers(aten.hardtanh.default)
def hardtanh(call: Call, x: Value, low: float = -1, high: float = 1) -> Value:
    return call.pointwise(lambda a: clip(a, low, high), x)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(call: Call, grad: Value, x: Value, low: float, high: float) -> Value:
    def slope(g: Expr, a: Expr) -> Expr:
        outside = op("or", op("le", a, like(low, a)), op("ge", a, like(high, a)))
        return zero_where(outside, g)

    return gradient(call, slope, grad, x)


def sixth(x: Expr) -> Expr:
    """Return clip(x + 3, 0, 6) / 6."""
    return div(clip(add(x, 3.0), 0, 6), 6.0)


@lowers(aten.hardsigmoid.default)
def hardsigmoid(call: Call, x: Value) -> Value:
    return call.pointwise(sixth, x)


@lowers(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(call: Call, grad: Value, x: Value) -> Value:
    def slope(g: Expr, a: Expr) -> Expr:
        inside = op("and", greater(a, -3.0), less(a, 3.0))
        return select(inside, mul(g, 1 / 6), like(0, g))

    return gradient(call, slope, grad, x)


@lowers(aten.hardswish.default)
def hardswish(call: Call, x: Value) -> Value:
    return call.pointwise(lambda a: div(op("mul", a, clip(add(a, 3.0), 0, 6)), 6.0), x)


@lowers(aten.hardswish_backward.default)
def hardswish_backward(call: Call, grad: Value, x: Value) -> Value:
    def slope(g: Expr, a: Expr) -> Expr:
        bent = op("mul", g, add(div(a, 3.0), 0.5))
        return select(op("le", a, like(-3.0, a)), like(0, g), select(less(a, 3.0), bent, g))

    return gradient(call, slope, grad, x)


@lowers(aten.softshrink.default)
def softshrink(call: Call, x: Value, lambd: float = 0.5) -> Value:
    def shrunk(a: Expr) -> Expr:
        low = select(less(a, -lambd), add(a, lambd), mul(a, 0.0))
        return select(greater(a, lambd), sub(a, lambd), low)

    return call.pointwise(shrunk, x)


@lowers(aten.hardshrink.default)
def hardshrink(call: Call, x: Value, lambd: float = 0.5) -> Value:
    def shrunk(a: Expr) -> Expr:
        inside = op("and", op("ge", a, like(-lambd, a)), op("le", a, like(lambd, a)))
        return zero_where(inside, a)

    return call.pointwise_exact(shrunk, x)


# -- exponential pieces ---------------------------------------------------------------------------


def exponential_linear(x: Expr, alpha: float, scale: float, input_scale: float) -> Expr:
    """Return scale * x above 0, and alpha * scale * (exp(input_scale * x) - 1) below."""
    bent = mul(op("expm1", mul(x, input_scale)), alpha * scale)
    return select(greater(x, 0.0), mul(x, scale), bent)


@lowers(aten.elu.default)
def elu(call: Call, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    return call.pointwise(lambda a: exponential_linear(a, alpha, scale, input_scale), x)


@lowers(aten.celu.default)
def celu(call: Call, x: Value, alpha: float = 1.0) -> Value:
    return call.pointwise(lambda a: exponential_linear(a, alpha, 1, 1 / alpha), x)


@lowers(aten.selu.default)
def selu(call: Call, x: Value) -> Value:
    return call.pointwise(lambda a: exponential_linear(a, _SELU_ALPHA, _SELU_SCALE, 1), x)


@lowers(aten.elu_backward.default)
def elu_backward(
    call: Call,
    grad: Value,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    x: Value,
) -> Value:
    """``x`` is the result of the forward where ``is_result``."""

    def slope(g: Expr, a: Expr) -> Expr:
        if is_result:
            bent = mul(mul(add(a, alpha * scale), input_scale), g)
        else:
            grown = mul(op("exp", mul(a, input_scale)), input_scale * alpha * scale)
            bent = op("mul", g, grown)
        return select(op("le", a, like(0.0, a)), bent, mul(g, scale))

    return call.pointwise(slope, grad, x)


# -- gates ----------------------------------------------------------------------------------------


@lowers(aten.glu.default)
def glu(call: Call, x: Value, dim: int = -1) -> Value:
    """The first half along ``dim`` times the sigmoid of the second."""
    axis = wrap(dim, len(x.shape))
    half = call.out.shape[axis]
    kind = compute_type(call.out.dtype)

    def body(at: Indices) -> Expr:
        gate = cast(x.at(replaced(at, axis, at[axis] + half)), kind)
        return op("mul", cast(x.at(at), kind), op("sigmoid", gate))

    return call.define(body)
