"""Elementwise operations against eager: values, special values, types."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.frontend.tracing import body, check, lowered

FINITE = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.5, 3.0, -3.0, 6.0, 25.0, -25.0]
SPECIAL = torch.tensor([*FINITE, float("inf"), float("-inf"), float("nan")])
INTEGERS = torch.tensor([0, 1, -1, 2, -2, 3, -3, 7, 100, -128, 127, 5])

FUNCTIONS = """
abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor frac
isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not logit nan_to_num
neg positive reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinh sqrt square tan tanh
trunc
"""

ACTIVATIONS = """
celu elu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu
silu softplus softshrink
"""

OPERATORS = """
add sub mul div maximum minimum fmax fmin atan2 hypot copysign eq ne lt le gt ge logical_and
logical_or logical_xor pow remainder fmod floor_divide nextafter xlogy
"""

INTEGER_OPERATORS = """
add sub mul div maximum minimum eq lt bitwise_and bitwise_or bitwise_xor bitwise_left_shift
bitwise_right_shift floor_divide remainder fmod
"""


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: getattr(F, name)(x)


FLOAT_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = (
    {name: getattr(torch, name) for name in FUNCTIONS.split()}
    | {
        "clamp": lambda x: x.clamp(-1, 2.5),
        "clamp_min": lambda x: x.clamp(min=-1),
        "round 1": lambda x: torch.round(x * 1.37, decimals=1),
        "rsub": lambda x: torch.rsub(x, 2, alpha=3),
        "pow": lambda x: torch.stack([x**p for p in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 1.7)]),
        "2 ** x": lambda x: torch.stack([2**x, 3.5**x]),
        "fill": lambda x: torch.full_like(x, 0.1) + x.new_ones(()),
        "where": lambda x: torch.where(x > 0.3, x, 0.1),
        "masked_fill": lambda x: x.masked_fill(x < 1, float("-inf")),
        "remainder": lambda x: torch.stack([x % 1.5, x % -1.5, x.fmod(1.5)]),
        "floor_divide": lambda x: torch.stack(
            [x // 0.4, x // -0.7, x.div(0.4, rounding_mode="trunc")]
        ),
        "gelu": lambda x: torch.stack([F.gelu(x), F.gelu(x, approximate="tanh")]),
        "to": lambda x: x.to(torch.float64) + x.to(torch.float16) + x.bool(),
    }
    | {name: activation(name) for name in ACTIVATIONS.split()}
)

BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name) for name in OPERATORS.split()
} | {
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "lerp": lambda x, y: torch.stack([torch.lerp(x, y, 0.3), torch.lerp(x, y, 0.8)]),
}

INTEGER: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name) for name in INTEGER_OPERATORS.split()
} | {
    "not": lambda x, _: ~x,
    "neg": lambda x, _: -x,
    "power": lambda x, _: x**5,
    "sqrt": lambda x, _: x.abs().sqrt(),
    "truncating division": lambda x, y: x.div(y, rounding_mode="trunc"),
    "times float": lambda x, _: x * 0.5,
    "compare with float": lambda x, _: x > 1.5,
}


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
def test_a_function_of_floats_is_eager_s(name: str) -> None:
    check(FLOAT_FUNCTIONS[name], example(name))


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
def test_a_function_of_bf16_is_eager_s(name: str) -> None:
    check(FLOAT_FUNCTIONS[name], example(name).bfloat16())


def example(name: str) -> torch.Tensor:
    """Return special values; eager's own GELU of infinity is NaN, and GLU takes an even length."""
    return torch.tensor(FINITE) if name in ("gelu", "glu") else SPECIAL


@pytest.mark.parametrize("name", BINARY)
def test_a_function_of_two_floats_is_eager_s(name: str) -> None:
    x, y = SPECIAL[:, None], SPECIAL[None, :]
    check(BINARY[name], x, y)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("name", INTEGER)
def test_a_function_of_integers_is_eager_s(name: str, dtype: torch.dtype) -> None:
    x = INTEGERS.to(dtype)[:, None]
    y = INTEGERS.to(dtype)[None, 1:]
    if dtype is torch.uint8 or "shift" in name:
        y = y.abs() % 7 + 1
    check(INTEGER[name], x, y)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x + y,
        lambda x, y: x * y,
        lambda x, y: x & y | ~x ^ y,
        lambda x, y: x == y,
        lambda x, y: x + 1,
        lambda x, y: x * 0.5,
        lambda x, y: torch.maximum(x, y),
        lambda x, y: torch.where(x, y, False),
    ],
)
def test_arithmetic_on_bools_is_eager_s(fn: Callable[..., torch.Tensor]) -> None:
    check(fn, torch.tensor([True, False])[:, None], torch.tensor([True, False]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_a_wider_number_wraps_before_it_is_compared(dtype: torch.dtype) -> None:
    x, y = torch.tensor([1, 100, 7], dtype=dtype), torch.tensor(-4)
    check(lambda x, y: (torch.maximum(x, y), x > y, x + y, x.clamp(y), x * 2 - y), x, y)


def test_multiplying_by_one_emits_nothing() -> None:
    graph = lowered(lambda x: (x * 1 / 1) ** 1 + 1, torch.randn(3))
    assert len(graph.nodes) == 1


# -- rounding that a later pass must not drop ------------------------------------------------------


def test_a_users_cast_to_bf16_keeps_its_rounding() -> None:
    assert body(lowered(lambda x: x.bfloat16(), torch.randn(3))) == [
        "to_copy[i0] = bf16(round_bf16(x_1[i0]))",
        "return to_copy",
    ]


def test_a_comparison_reads_bf16_exactly() -> None:
    x = torch.randn(3, dtype=torch.bfloat16)
    assert body(lowered(lambda x, y: x < y, x, x.clone()))[0] == (
        "lt[i0] = round_bf16(f32(x_1[i0])) < round_bf16(f32(y_1[i0]))"
    )


def test_a_number_beside_bf16_is_rounded_as_on_the_cpu() -> None:
    x = torch.tensor([0.1], dtype=torch.bfloat16)
    graph = check(lambda x: x > 0.1, x)
    assert "0.10009765625" in body(graph)[0]


def test_f16_to_integers_reads_f16_exactly() -> None:
    graph = lowered(lambda x: x.long(), torch.randn(3).half())
    assert body(graph)[0] == "to_copy[i0] = i64(round_f16(f32(x_1[i0])))"


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("decimals", (5, 39, 308, 309, 2**62))
def test_numbers_are_rounded_to_any_number_of_decimals(decimals: int, dtype: torch.dtype):
    numbers = torch.cat([SPECIAL, torch.tensor([0.123456, -1234.567, 3e38, 1e-40])]).to(dtype)
    for places in (decimals, -decimals):
        check(partial(torch.round, decimals=places), numbers)


NUMBERED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "add": lambda x, n: x + n,
    "sub": lambda x, n: n - x,
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n,
    "floor": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "remainder": lambda x, n: x % n,
    "fmod": torch.fmod,
    "to a power": lambda x, n: x**n,
    "power of": lambda x, n: n**x,
    "float_power": torch.float_power,
    "at least": lambda x, n: x.clamp(min=n),
    "at most": lambda x, n: x.clamp(max=n),
    "filled": torch.full_like,
    "masked": lambda x, n: x.masked_fill(x > 0, n),
    "chosen": lambda x, n: torch.where(x > 0, x, n),
    "compared": lambda x, n: x <= n,
    "padded": lambda x, n: F.pad(x, (1, 1), value=n),
    "interpolated": lambda x, n: torch.lerp(x, x.flip(0), n),
    "weighted": lambda x, n: torch.addcmul(x, x, x, value=n),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "celu": F.celu,
    "threshold": lambda x, n: F.threshold(x, n, 1.0),
    "softplus": F.softplus,
    "hardshrink": F.hardshrink,
    "logit": torch.logit,
    "norm": torch.linalg.vector_norm,
    "spread": lambda x, n: torch.var(x, 0, correction=n),
    "huber": lambda x, n: F.smooth_l1_loss(x, x * 3, beta=n),
    "normalised": lambda x, n: F.layer_norm(x, x.shape, eps=n),
    "rounded": lambda x, n: torch.round(x, decimals=n),
}


def _of_number(fn: Callable[[torch.Tensor, Any], torch.Tensor], n: float) -> Callable:
    return lambda x: fn(x, n)


INFINITE, LARGE = float("inf"), 2**63 - 1


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize("name", NUMBERED)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64))
def test_no_number_that_eager_takes_ends_a_capture(name: str, dtype: torch.dtype):
    x = torch.tensor([1.5, -2.5, 0.0, 3.0, -1.0, 2.0]).to(dtype)
    for n in (INFINITE, -INFINITE, float("nan"), 1e308, -1e308, 1e-310, -0.0, LARGE, -LARGE - 1):
        fn = _of_number(NUMBERED[name], n)
        try:
            fn(x)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            continue
        lowered(fn, x)
