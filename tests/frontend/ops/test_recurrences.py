"""Recurrences h = a * h + b beside a loop in eager: values, gradients, kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan

import fusec
import fusec.frontend.ops.recurrences
from fusec.processors import PROCESSORS
from tests.support import BACKEND, check, externs, on_processor, values

recurrence = torch.ops.fusec.recurrence
fusec_alone = pytest.mark.skipif(BACKEND != "fusec", reason="asks fusec alone")


def looped(a: Tensor, b: Tensor, start: Tensor | None, dim: int, backwards: bool) -> Tensor:
    a, b = a.movedim(dim, 0), b.movedim(dim, 0)
    h: list[Tensor] = []
    for t in reversed(range(len(b))) if backwards else range(len(b)):
        before = h[-1] if h else start
        h.append(b[t] if before is None else a[t] * before + b[t])
    return torch.stack(h[::-1] if backwards else h, dim)


def operands(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return values(*shape, low=-1, high=1, dtype=dtype), values(*shape, seed=1, dtype=dtype)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_eager_kernel_and_its_gradient_are_those_of_a_loop(
    dim: int, backwards: bool, begins: bool
) -> None:
    a, b = (x.requires_grad_() for x in operands(3, 7, 5, dtype=torch.float64))
    given = [a, b]
    if begins:
        given.append(values(3, 7, 5, seed=2, dtype=torch.float64).select(dim, 0).requires_grad_())
    start = given[2] if begins else None
    found, expected = (f(a, b, start, dim, backwards) for f in (recurrence, looped))
    torch.testing.assert_close(found, expected)
    weights = values(3, 7, 5, dtype=torch.float64)
    gradients = [torch.autograd.grad((y * weights).sum(), given) for y in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_recurrences_match_eager(dim: int, backwards: bool, dtype: torch.dtype) -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return recurrence(a, b.sin(), None, dim, backwards) * 2

    check(fn, *operands(4, 33, 20, dtype=dtype), train=True)


@pytest.mark.parametrize("backwards", [False, True])
def test_recurrences_that_begin_somewhere_match_eager(backwards: bool) -> None:
    def fn(a: Tensor, b: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence(a, b, start, 1, backwards), recurrence(a, b, start * 2, -2, backwards)

    start = values(4, 20, seed=2)
    check(fn, *operands(4, 33, 20), start, train=True)
    start[0, 0], start[1] = float("inf"), float("nan")
    check(fn, *operands(4, 33, 20), start)


@fusec_alone
@pytest.mark.parametrize("backwards", [False, True])
def test_a_recurrence_and_its_gradient_are_a_kernel_each(backwards: bool) -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return recurrence(a.sigmoid(), b, None, 1, backwards) * b.tanh()

    explained = fusec.explain(fn, *operands(8, 300, 64), train=True)
    assert [len(graph.kernels) for graph in explained.graphs] == [1, 1]
    assert externs(fn, *operands(8, 300, 64), train=True) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(0, 20), (30, 0), (1, 300), (300, 1), (300,)], ids=str)
def test_recurrences_of_a_shape(shape: tuple[int, ...]) -> None:
    a, b = operands(*shape)
    check(
        lambda a, b: (recurrence(a, b, None, 0, False), recurrence(a, b, None, -1, True)),
        a,
        b,
        train=True,
    )


@pytest.mark.parametrize("backwards", [False, True])
def test_recurrences_of_two_points_beside_each_other(backwards: bool) -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return recurrence(a, b.sin(), None, 1, backwards).cos()

    check(fn, *operands(300, 2), train=True)
    check(lambda x: x.cummax(1).values.sin(), values(33000, 2), train=True)


def test_recurrences_of_views() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return recurrence(a.t().expand(3, -1, -1), b[:, ::2].flip(1), None, 1, False)

    check(fn, values(20, 35, low=-1, high=1), values(3, 70, 20, seed=1), train=True)


def test_recurrences_of_symbolic_length() -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence(a, b, None, 1, False), recurrence(a, b, None, 1, True)

    more = [operands(4, n, 20) for n in (7, 50)]
    check(fn, *operands(4, 33, 20), dynamic=True, train=True, more=more)


def test_forwards_and_backwards_are_two_kernels() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        forth, back = (recurrence(a, b, None, 1, backwards) for backwards in (False, True))
        return forth * back + recurrence(a, forth, None, 1, True) + back.cumsum(1)

    check(fn, *operands(4, 200, 20), train=True)


def test_nan_and_infinity_stay_from_where_they_are() -> None:
    a, b = operands(9, 40, 16)
    a[0, 0], b[1, 5], b[2, 7], a[3, 9] = float("nan"), float("nan"), float("inf"), float("nan")
    a[4] = 0
    check(lambda a, b: looped(a, b, None, 1, False), a, b)
    compiled = torch.compile(
        lambda a, b: recurrence(a, b, None, 1, False), backend=BACKEND, options={"strict": True}
    )
    torch.testing.assert_close(compiled(a, b), looped(a, b, None, 1, False), equal_nan=True)


def test_a_long_recurrence_loses_no_more_digits_than_a_loop() -> None:
    a, b = torch.full((20_000, 1), 1.0), torch.full((20_000, 1), 0.1)
    check(lambda a, b: recurrence(a, b, None, 0, False), a, b, tol=1e-7)


@fusec_alone
@pytest.mark.parametrize("name", ["sse4", "avx2"])
def test_vectors_of_other_widths(name: str) -> None:
    with on_processor(PROCESSORS[f"cpu:{name}"].features):
        check(lambda a, b: recurrence(a, b, None, 1, True) * 2, *operands(4, 33, 20), train=True)


# -- associative scans -----------------------------------------------------------------------------


def combine(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def scanned(dim: int, *, reverse: bool = False, both: bool = False) -> Callable[..., Any]:
    def fn(a: Tensor, b: Tensor) -> Any:
        found = associative_scan(combine, (a, b), dim, reverse, combine_mode="generic")
        return found if both else found[1] * 2

    return fn


SCANS = {
    "one": scanned(1),
    "from the end": scanned(1, reverse=True),
    "along the last axis": scanned(2),
    "with its factors' product": scanned(0, both=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCANS)
def test_associative_scans_match_eager(name: str) -> None:
    check(SCANS[name], *operands(4, 18, 6), train=True)


@fusec_alone
@pytest.mark.parametrize("name", ["one", "from the end"])
def test_an_associative_scan_is_one_kernel_and_so_is_its_gradient(name: str) -> None:
    explained = fusec.explain(SCANS[name], *operands(4, 18, 6), train=True)
    assert [len(graph.kernels) for graph in explained.graphs] == [1, 1]


def test_an_associative_scan_of_symbolic_sizes() -> None:
    check(SCANS["one"], *operands(4, 9, 6), dynamic=True, more=[operands(5, 7, 3)])


@pytest.mark.parametrize("length", [3, 10, 70])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_part_of_a_recurrence_is_that_part(length: int, backwards: bool) -> None:
    def rest(a: Tensor, b: Tensor) -> Tensor:
        h = recurrence(a, b, None, 0, backwards)
        made = torch.zeros_like(b)
        made[1:] = h[1:] * 2
        return made

    check(rest, *operands(length, 4), train=True)
