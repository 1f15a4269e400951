"""Roundings to 16 bits that a kernel must not drop: equal to eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
