"""Sums of products that have few terms each are one product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support import BACKEND, check, externs, values

ROWS, STEPS = 4, 6


def recurrence(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], len(u))
    for step in x:
        h = torch.tanh(step @ w.t() + h @ u.t())
    return h


def inputs(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return (
        values(STEPS, rows, 70, dtype=dtype),
        values(90, 70, dtype=dtype, seed=1) / 10,
        values(90, 90, dtype=dtype, seed=2) / 10,
    )


def products(fn: Callable[..., object], *given: Tensor) -> int:
    """Count the library's products in the training step of a function."""
    calls = [op for op, _ in externs(fn, *given, train=True)]
    return sum(op.startswith(("mm.", "addmm.")) for op in calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_gradient_of_a_recurrence_s_weights(dtype: torch.dtype) -> None:
    check(
        recurrence, *inputs(dtype=dtype), train=True, tol=1e-2 if dtype is torch.bfloat16 else None
    )


@pytest.mark.skipif(BACKEND != "fusec", reason="asks fusec alone")
def test_each_weight_has_one_product_for_its_gradient() -> None:
    def alone(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        return recurrence(x, w, u.detach())

    joined = products(recurrence, *inputs())
    assert joined == products(alone, *inputs()) + 1
    many = products(recurrence, *inputs(rows=60))  # operands of 60 rows are larger than the weights
    assert many >= joined + 2 * (STEPS - 1) - 1


@pytest.mark.skipif(BACKEND != "fusec", reason="asks fusec alone")
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_several_shapes_and_other_terms(turned: bool) -> None:
    def step(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, rest: Tensor) -> Tensor:
        left, right = ((c.t(), a) if turned else (a.t(), c)), ((d.t(), b) if turned else (b.t(), d))
        total = left[0] @ left[1] + rest
        total = total + right[0] @ right[1]
        return total + e.t() @ (c if not turned else a) * 2

    given = [values(6, 40, seed=k) for k in range(2)] + [values(6, 40, seed=k) for k in (2, 3, 4)]
    check(step, *given, values(40, 40, seed=9), train=True)


def test_a_product_with_another_reader_stays() -> None:
    def step(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second = a.t() @ x, b.t() @ y
        return first + second, first.relu()

    check(step, *(values(3, 50, seed=k) for k in range(4)), train=True)


def turned(a: Tensor, b: Tensor) -> Tensor:
    return (a.t() @ b).t()


def flat(a: Tensor, b: Tensor) -> Tensor:
    return b.t() @ a


@pytest.mark.parametrize("first, second", [(turned, turned), (flat, flat), (turned, flat)])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("row_major", (False, True))
def test_a_sum_is_laid_out_as_in_eager(
    first: Callable[..., Tensor], second: Callable[..., Tensor], place: int, row_major: bool
) -> None:
    """Other terms stand at each place among the products, and lie as these or otherwise."""

    def step(a: Tensor, b: Tensor, c: Tensor, x: Tensor, y: Tensor, z: Tensor, o: Tensor) -> Tensor:
        terms = [first(a, x), second(b, y), first(c, z)]
        terms.insert(place, o)
        return terms[0] + terms[1] + (terms[2] + terms[3])

    rest = values(24, 20, seed=9) if row_major else values(20, 24, seed=9).t()
    rows = [values(3, n, seed=k) for k, n in enumerate((20, 20, 20, 24, 24, 24))]
    check(step, *rows, rest, train=True)


def test_terms_whose_sum_is_laid_out_otherwise_than_each_stay_as_they_are_added() -> None:
    def step(a: Tensor, b: Tensor, x: Tensor, y: Tensor, o: Tensor, p: Tensor) -> Tensor:
        rows, more = o.expand(24, 20), p.expand(24, 20)
        return rows + (more + (turned(a, x) + turned(b, y)))

    rows = [values(3, n, seed=k) for k, n in enumerate((20, 20, 24, 24))]
    check(step, *rows, values(20), values(20, seed=9), train=True)


def test_symbolic_rows() -> None:
    for rows in (3, 5):
        check(recurrence, *inputs(rows), train=True, dynamic=True)


def test_a_sum_that_is_doubled_again_and_again_is_added_whole() -> None:
    """Each doubling reads its sum twice: taken apart, 40 of them would be 2^40 terms."""

    def doubled(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        for _ in range(40):
            h = h + h
        return h * 2.0**-40

    check(doubled, values(3, 4), values(4, 4, seed=1), train=True)
