"""Roundings to 16 bits that a kernel must not drop: equal to eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import triton_backend
from tests.support import compile_with

Function = Callable[[torch.Tensor, torch.Tensor], object]

FUNCTIONS: dict[str, Function] = {
    "a cast that the user wrote": lambda x, y: x.bfloat16().float() * 3,
    "a comparison of a sum": lambda x, y: (x.bfloat16() + y.bfloat16()) > y.bfloat16(),
    "the floor of a product": lambda x, y: (x.half() * y.half()).floor(),
    "a value that is also stored": lambda x, y: (h := x.half() + y.half(), h * 3),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_kernels_round_where_eager_is_seen_to_round(function: Function) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, y = torch.randn(2, 64, 64)
    compiled = torch.compile(function, backend="fusec", options={"strict": True})
    torch.testing.assert_close(compiled(x, y), function(x, y), rtol=0, atol=0)


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = (x * 1.1 + y) * y - x / (y.abs() + 1)
    return (h.abs() * 0.3 + x).relu().sqrt() * h + x


CHAINS: dict[str, Function] = {
    "arithmetic": chain,
    "indices": lambda x, y: (torch.cat((x * y, x + y), 1)[:, ::3].mT * 3 + 1).relu() * 0.37,
    "activations": lambda x, y: F.silu(x * 1.1) * y + F.gelu(y + x, approximate="tanh"),
    "a biased product": lambda x, y: F.relu(F.linear(x * 0.7, y, x[0])) * 1.7,
    "a row's sum": lambda x, y: (x * y).sum(-1, keepdim=True) * 1.1 + x.amax(0) * y,
    "a norm": lambda x, y: F.layer_norm(x * y, (64,), y[0], x[0]) * 1.1 + x,
    "casts": lambda x, y: ((x * y).float() * 1.1).to(x.dtype) * y,
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_eager_precision_rounds_every_intermediate(name: str, dtype: torch.dtype) -> None:
    fn = CHAINS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, y = torch.randn(2, 64, 64).to(dtype)
    options = {"strict": True, "verify": True, "precision": "eager"}
    found = torch.compile(fn, backend="fusec", options=options)(x, y)
    expected = fn(x, y)
    if name in ("a row's sum", "a norm"):  # sums of f32 in another order, rounded
        assert (found != expected).float().mean() < 0.02
        torch.testing.assert_close(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_best_precision_is_closer_than_eager(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, y = torch.randn(2, 64, 64).to(dtype)
    exact = chain(x.double(), y.double())
    found = torch.compile(chain, backend="fusec", options={"strict": True})(x, y)
    error = [(v.double() - exact).abs().mean() for v in (found, chain(x, y))]
    assert error[0] < 0.7 * error[1]


def test_eager_precision_holds_in_gradients() -> None:
    inputs = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for compiled in (False, True):
        x, y = (v.clone().requires_grad_() for v in inputs)
        torch._dynamo.reset()
        options = {"strict": True, "precision": "eager"}
        fn = torch.compile(product, backend="fusec", options=options) if compiled else product
        fn(x, y).backward(inputs[0])
        results.append((x.grad, y.grad))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y + x) * y * 0.3


def test_gpu_kernels_round_as_eager_too() -> None:
    x, y = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch._dynamo.reset()
    found = torch.compile(chain, backend=triton_backend.triton_eager_rounding)(x, y)
    torch.testing.assert_close(found, chain(x, y), rtol=0, atol=0)


EQUALITIES: dict[str, tuple[Callable[..., Any], bool]] = {
    "the smallest of halves": (lambda x, y: x.half().amin(0), True),
    "the greatest of halves": (lambda x, y: x.half().amax((0, 1)), True),
    "clamped halves": (lambda x, y: (x.half() * 3).clamp(3.0, 3.01), True),
    "a product": (lambda x, y: x.bfloat16() * 1.1 == y.bfloat16(), False),
    "a sum": (lambda x, y: (x.half() + 0.1) != (y.half() + 0.1), False),
    "a maximum of products": (
        lambda x, y: (p := x.bfloat16() * 1.1) == p.amax(1, keepdim=True),
        False,
    ),
    "zero": (lambda x, y: (x.half() * 1e-4 * y.half() * 1e-4) == 0, False),
}


def close_values(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return f32 values so close together that many are one value in 16 bits."""
    rows = 24 if backend == "fusec" else 6
    steps = torch.randint(0, 40, (2, rows, 20), generator=torch.Generator().manual_seed(0))
    x, y = 1 + steps * 2.0**-13
    return x, (x.bfloat16() * 1.1).float().where(steps[1] > 20, y)


BACKENDS = {"fusec": "fusec", "triton_interpreter": triton_backend.triton_interpreter}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EQUALITIES)
def test_a_comparison_for_equality_sees_rounded_values_alone(name: str, backend: str) -> None:
    fn, train = EQUALITIES[name]
    torch._dynamo.reset()
    found = outcome(compile_with(fn, BACKENDS[backend]), *close_values(backend), train=train)
    expected = outcome(fn, *close_values(backend), train=train)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    # A gradient goes to the equal elements, divided by their number; eager rounds the quotient.
    torch.testing.assert_close(found[1:], expected[1:], rtol=2e-3, atol=0)


def outcome(fn: Callable[..., Any], *inputs: torch.Tensor, train: bool) -> tuple[Any, ...]:
    """Return what a function computes and, in training, the gradients of its sum."""
    if not train:
        with torch.no_grad():
            return (fn(*inputs),)
    leaves = [v.clone().requires_grad_() for v in inputs]
    result = fn(*leaves)
    result.float().sum().backward()
    return (result.detach(), leaves[0].grad)


BESIDE_A_NUMBER: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "add": lambda x, s: x + s, "radd": lambda x, s: s + x, "sub": lambda x, s: x - s,
    "rsub": lambda x, s: s - x, "mul": lambda x, s: x * s, "div": lambda x, s: x / s,
    "fmod": torch.fmod, "remainder": lambda x, s: x % s, "rremainder": lambda x, s: s % x,
    "floor_divide": lambda x, s: x // s, "pow": lambda x, s: x.abs() ** s,
    "rpow": lambda x, s: s**x, "lt": lambda x, s: x < s, "eq": lambda x, s: x == s,
    "where": lambda x, s: torch.where(x > 0, x, s),
    "alpha": lambda x, s: torch.add(x, x.flip(0), alpha=s) if isinstance(s, float) else x,
    "leaky_relu": lambda x, s: F.leaky_relu(x, s) if isinstance(s, float) else x,
    "hypot": lambda x, s: torch.hypot(x, torch.as_tensor(s)),
    "maximum": lambda x, s: torch.maximum(x, torch.as_tensor(s)),
    "in place": lambda x, s: x.clone().add_(s),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [1.7, 257, torch.tensor(0.3), torch.tensor(257)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_number_beside_16_bits_is_rounded_where_eager_rounds_it(
    dtype: torch.dtype, number: Any
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(1024) * 3).to(dtype)

    def fn(x: torch.Tensor, s: Any) -> dict[str, torch.Tensor]:
        return {name: function(x, s) for name, function in BESIDE_A_NUMBER.items()}

    found, eager = compile_with(fn)(x, number), fn(x, number)
    for name in BESIDE_A_NUMBER:
        torch.testing.assert_close(
            found[name], eager[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: n + m
        )
