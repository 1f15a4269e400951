"""Reductions against eager, and their printed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.frontend.tracing import body, check, lowered

X = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))

REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: (x.sum(), x.sum(1), x.sum((0, -1), keepdim=True)),
    "mean": lambda x: (x.mean(), x.mean(-1, keepdim=True), x.mean((0, 2))),
    "prod": lambda x: (x.prod(), x.prod(1)),
    "var": lambda x: (x.var(), x.var(1, correction=0), x.std((0, 2), keepdim=True)),
    "var_mean": lambda x: torch.var_mean(x, (1, 2), correction=2, keepdim=True),
    "extremes": lambda x: (x.amax(1), x.amin((0, 1), keepdim=True), x.max(), x.min()),
    "max with index": lambda x: (*x.max(1), *x.min(-1, keepdim=True)),
    "argmax": lambda x: (x.argmax(), x.argmin(0), x.argmax(1, keepdim=True)),
    "any": lambda x: ((x > 1).any(), (x > -2).all(1), (x > 1).any((0, 2), keepdim=True)),
    "norm": lambda x: tuple(
        torch.linalg.vector_norm(x, p, 1) for p in (0, 1, 2, 3.0, float("inf"), -float("inf"))
    ),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(-1)),
    "count": lambda x: (x > 0).count_nonzero(1),
    "sum of bools": lambda x: (x > 0).sum(),
    "nested": lambda x: (x - x.mean(1, keepdim=True)).square().sum(1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_is_eager_s(name: str) -> None:
    check(REDUCTIONS[name], X)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_over_symbolic_sizes_is_eager_s(name: str) -> None:
    check(REDUCTIONS[name], X, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_are_summed_in_i64(dtype: torch.dtype) -> None:
    x = (X * 50).abs().to(dtype)
    check(lambda x: (x.sum(1), x.prod(2), x.amax(1), x.any(0), x.sum(1, dtype=torch.float32)), x)


@pytest.mark.parametrize("fn", [torch.max, torch.min])
def test_the_first_of_equals_wins_and_nan_beats_all(fn: Callable[..., Any]) -> None:
    x = torch.tensor([[1.0, 2, 2, 1], [1, float("nan"), 3, float("nan")], [float("-inf")] * 4])
    check(lambda x: tuple(fn(x, 1)), x)
    check(lambda x: (x.argmax(1), x.argmin(1), x.amax(1)), x)


def test_a_scalar_reduces_to_itself() -> None:
    check(lambda x: (x.sum(), x.mean(0), x.amax(-1), *x.max(0)), torch.tensor(3.0))


def test_a_logsumexp_of_infinities_is_infinite() -> None:
    x = torch.tensor([[float("-inf")] * 2, [float("inf"), 1.0], [0.0, 0.0]])
    check(lambda x: x.logsumexp(1), x)


def test_a_reduction_over_nothing_is_left_to_eager() -> None:
    graph = lowered(lambda x: x[:, :0].sum(1), X)
    assert graph.nodes[-1].reason == "an empty tensor"


def test_a_mean_of_bf16_accumulates_in_f32() -> None:
    x = torch.randn(3, 768, dtype=torch.bfloat16)
    assert body(lowered(lambda x: x.mean(1), x)) == [
        "mean[i0] = bf16(sum(r1: f32(x_1[i0, r1])) / 768.0)",
        "return mean",
    ]


def test_a_variance_is_two_passes() -> None:
    assert body(lowered(lambda x: torch.var_mean(x, 1, correction=0), torch.randn(3, 8))) == [
        "var_mean_mean[i0] = sum(r1: x_1[i0, r1]) / 8.0",
        "var_mean_0[i0] = sum(r1: (x_1[i0, r1] - var_mean_mean[i0]) * "
        "(x_1[i0, r1] - var_mean_mean[i0])) / 8.0",
        "return var_mean_0, var_mean_mean",
    ]


def test_an_argmax_finds_the_stored_value_of_bf16() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert body(check(lambda x: x.argmax(1), x)) == [
        "argmax[i0] = i64(argmax(r1: round_bf16(f32(x_1[i0, r1])), "
        "where(isnan(round_bf16(f32(x_1[i0, r1]))), (r1):i32 ^ -2147483648, (r1):i32)) "
        "& 2147483647)",
        "return argmax",
    ]
