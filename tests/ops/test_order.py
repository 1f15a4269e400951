"""The greatest elements of short lines beside eager; equal ones come in order of place here."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusec
from tests.support import BACKEND, check, compile_with

fusec_alone = pytest.mark.skipif(BACKEND != "fusec", reason="asks what fusec makes")
NAN, INF = math.nan, math.inf


def distinct(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return numbers of which no two along any line are equal."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    return (torch.randperm(count, generator=generator) - count // 2).reshape(shape).to(dtype)


def chosen(x: Tensor, k: int, **how: bool) -> tuple[Tensor, Tensor]:
    return compile_with(lambda x: torch.topk(x, k, **how))(x)


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
def test_the_greatest_elements_come_in_order_with_their_places(k: int) -> None:
    check(lambda x: torch.topk(x, k), distinct(3, 17), left=())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
)
def test_of_any_type(dtype: torch.dtype) -> None:
    check(lambda x: torch.topk(x, 3), (distinct(2, 9) + 9).to(dtype), left=())


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_along_any_axis_of_any_layout(dim: int) -> None:
    check(lambda x: torch.topk(x, 3, dim), distinct(5, 4, 7).transpose(0, 2), left=())


def test_the_least_integers() -> None:
    check(lambda x: torch.topk(x, 4, largest=False), distinct(3, 9, dtype=torch.int64), left=())


def test_of_a_number_and_of_lines_of_one_element() -> None:
    check(lambda x, y: (torch.topk(x, 1), torch.topk(y, 1)), torch.tensor(2.0), distinct(4, 1))


def test_no_lines_and_no_elements() -> None:
    check(lambda x: (torch.topk(x, 2), torch.topk(x, 0)), torch.empty(0, 5))


@pytest.mark.parametrize("columns", [8, 64])
def test_gradients_reach_what_is_chosen(columns: int) -> None:
    def routed(x: Tensor) -> Tensor:
        weight, _ = torch.topk(torch.softmax(x, -1), 2)
        return weight / weight.sum(-1, keepdim=True)

    check(routed, distinct(3000, columns) / 1000, train=True, left=())


def test_one_code_serves_any_number_of_lines() -> None:
    more = [(distinct(n, 9, seed=n),) for n in (1, 4, 11)]
    check(lambda x: torch.topk(x[:, :9], 3), distinct(6, 9), more=more, dynamic=True, left=())


# -- what has no order -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        [NAN, 1.0, INF, -INF, NAN, 2.0],
        [NAN] * 6,
        [-INF] * 6,
        [INF, -INF, INF, -INF, NAN, -INF],
        [0.0, -0.0, 0.0, -0.0, -1.0, -2.0],
        [3.0, 3.0, 3.0, 1.0, 3.0, 3.0],
        [-INF, -INF, 1.0, -INF, -INF, -INF],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_equal_elements_are_taken_from_the_first(
    line: list[float], dtype: torch.dtype, k: int
) -> None:
    x = torch.tensor([line, line[::-1]]).to(dtype)
    found, places = chosen(x, k)
    torch.testing.assert_close(found, torch.topk(x, k).values, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(places, torch.sort(x, descending=True, stable=True).indices[:, :k])
    taken = x.gather(1, places)
    assert torch.equal(found.signbit() | found.isnan(), taken.signbit() | taken.isnan())


def test_equal_integers_are_taken_from_the_first() -> None:
    least = torch.iinfo(torch.int64).min
    x = torch.tensor([[least, 5, least, 5, least]])
    assert chosen(x, 4)[1].tolist() == [[1, 3, 0, 2]]
    assert chosen(-x - 1, 4, largest=False)[1].tolist() == [[1, 3, 0, 2]]


# -- what is left to eager, and what shares a kernel -----------------------------------------------


@fusec_alone
@pytest.mark.parametrize(
    ("k", "columns", "how"), [(17, 40, {}), (2, 2000, {}), (2, 9, {"largest": False})]
)
def test_many_of_long_lines_and_the_least_floats_are_eager_s(
    k: int, columns: int, how: dict[str, bool]
) -> None:
    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(x, k, **how)

    x = distinct(3, columns)
    check(choose, x)
    (graph,) = fusec.explain(choose, x).graphs
    assert [extern.reason for extern in graph.externs] == ["sorting"]


@fusec_alone
@pytest.mark.parametrize("k", [2, 8])
def test_which_of_equal_elements_is_eager_s_under_eager_precision(k: int) -> None:
    x = torch.randint(0, 4, (200, 64)).bfloat16()
    assert not torch.equal(chosen(x, k)[1], torch.topk(x, k)[1])

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(x + 1, k)

    found = torch.compile(choose, backend="fusec", options={"precision": "eager"})(x)
    assert all(map(torch.equal, found, choose(x)))
    (graph,) = fusec.explain(choose, x, options={"precision": "eager"}).graphs
    assert [extern.reason for extern in graph.externs] == [
        "a choice that torch leaves open: eager's"
    ]


@fusec_alone
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize(("columns", "k"), [(8, 2), (64, 8)])
def test_a_router_is_one_kernel(target: str, columns: int, k: int) -> None:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        weight, place = torch.topk(F.softmax(logits, -1, dtype=torch.float32), k)
        return weight / weight.sum(-1, keepdim=True), place

    (graph,) = fusec.explain(route, distinct(64, columns), target=target).graphs
    assert not graph.externs
    assert len(graph.kernels) == 1
