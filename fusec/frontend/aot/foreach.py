"""Decompositions of operations on lists of tensors (``aten._foreach_*``) into those on one tensor.

Optimizers and gradient clipping are written with them. AOTAutograd applies these rules, so that
types, devices and shapes of each tensor are traced as if the program had been a loop; the results
are lowered like any other operations, and kernels of equal form become one launch
(``passes/fusion/horizontal.py``).

Worked example: ``_foreach_addcmul.ScalarList([x, y], [a, b], [c, d], [2, 3])`` becomes
``addcmul(x, a, c, value=2)`` and ``addcmul(y, b, d, value=3)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten

ScalarCall = Callable[..., Any]

_UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor"),
    *("frac", "lgamma", "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt"),
    *("sigmoid", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
_BINARY = ("add", "sub", "mul", "div")
_LIMITS = {"clamp_min": "clamp_min", "maximum": "clamp_min", "clamp_max": "clamp_max"} | {
    "minimum": "clamp_max"
}
"""Clamp of a list -> the operation on one tensor, where the limit is a number."""


def _each(rule: ScalarCall, *items: Any, **settings: Any) -> list[Any]:
    """Return ``rule`` of the k-th item of each list, for each k; other arguments go to each."""
    lists = [item for item in items if isinstance(item, list | tuple)]
    rows = [item if isinstance(item, list | tuple) else [item] * len(lists[0]) for item in items]
    return [rule(*row, **settings) for row in zip(*rows, strict=True)]


def _with_value(rule: ScalarCall, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    """Return ``x + value * (a op b)``; for a ``value`` that is a tensor, by a product."""
    if not isinstance(value, torch.Tensor):
        return rule(x, a, b, value=value)
    product = aten.mul.Tensor if rule is aten.addcmul.default else aten.div.Tensor
    return aten.add.Tensor(x, aten.mul.Tensor(value, product(a, b)))


def _each_of_numbers(each: ScalarCall, x: Any, a: Any, b: Any, numbers: torch.Tensor) -> Any:
    return each(x, a, b, numbers.unbind(0))


def _norm(x: Any, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    return aten.linalg_vector_norm.default(x, ord, None, False, dtype=dtype)


def foreach_decompositions() -> dict[Any, ScalarCall]:
    """Return the rules by overload; each takes an overload's arguments and returns a list."""
    table: dict[Any, ScalarCall] = {}
    for name in _UNARY:
        table[getattr(aten, f"_foreach_{name}").default] = getattr(aten, name).default
    for name in _BINARY:
        packet, one = getattr(aten, f"_foreach_{name}"), getattr(aten, name)
        table[packet.List] = one.Tensor
        table[packet.Scalar] = table[packet.ScalarList] = one.Scalar
    for name in ("add", "mul", "div"):
        table[getattr(aten, f"_foreach_{name}").Tensor] = getattr(aten, name).Tensor
    for name, numbers in _LIMITS.items():
        packet, one = getattr(aten, f"_foreach_{name}"), getattr(aten, numbers).default
        between = "maximum" if numbers == "clamp_min" else "minimum"
        table[packet.List] = getattr(aten, between).default
        table[packet.Scalar] = table[packet.ScalarList] = one
    for name in ("addcmul", "addcdiv"):
        packet = getattr(aten, f"_foreach_{name}")
        rule = partial(_with_value, getattr(aten, name).default)
        table[packet.Scalar] = table[packet.ScalarList] = rule
    lerp, power = aten._foreach_lerp, aten._foreach_pow
    table[lerp.List] = aten.lerp.Tensor
    table[lerp.Scalar] = table[lerp.ScalarList] = aten.lerp.Scalar
    table[power.List] = aten.pow.Tensor_Tensor
    table[power.Scalar] = table[power.ScalarList] = aten.pow.Tensor_Scalar
    table[power.ScalarAndTensor] = aten.pow.Scalar
    table[aten._foreach_copy.default] = aten.copy.default
    table[aten._foreach_zero.default] = aten.zeros_like.default
    table[aten._foreach_norm.Scalar] = _norm
    rules: dict[Any, ScalarCall] = {target: partial(_each, rule) for target, rule in table.items()}
    for packet in (aten._foreach_addcmul, aten._foreach_addcdiv):
        rules[packet.Tensor] = partial(_each_of_numbers, rules[packet.Scalar])
    return rules
