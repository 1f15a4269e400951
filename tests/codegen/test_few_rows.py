"""Products of few rows, and loops split over programs: values in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.codegen.targets import TARGETS, find_target
from fusec.ir.graph import Kernel
from fusec.passes.fusion.split_loop import SplitKernel, split_loop
from tests import triton_backend
from tests.support import check

ROW = find_target(triton_backend.TARGET)
HALF = (torch.bfloat16, torch.float16)
TYPES = pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fused(fn, *inputs, **options) -> None:
    check(fn, *inputs, backend="triton_fused", **options)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """Fuse all that can be, and split all loops that can be; the test must split some."""
    free = replace(ROW.machine, launch_us=0.0, bytes_per_us=1e9)
    found: list[Kernel] = []

    def divide(kernel: Kernel) -> tuple[Kernel, Kernel] | None:
        pair = split_loop(kernel, free)
        found.extend(pair or ())
        return pair

    _fuse_all(monkeypatch, divide)
    yield found
    assert found


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse all that can be, and split nothing."""
    _fuse_all(monkeypatch, lambda kernel: None)


def _fuse_all(monkeypatch: pytest.MonkeyPatch, divide: SplitKernel) -> None:
    machine = replace(ROW.machine, launch_us=1e3)
    codegen = replace(ROW.codegen, split=lambda kernel, machine: divide(kernel))
    row = replace(ROW, machine=machine, codegen=codegen)
    monkeypatch.setitem(TARGETS, triton_backend.TARGET, row)


# -- linear layers ---------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@TYPES
@pytest.mark.parametrize("rows", (1, 2, 3, 8, 15, 16))
def test_linear_of_few_rows_and_gelu(rows: int, dtype: torch.dtype) -> None:
    x, w, b = tensor(rows, 96), tensor(80, 96, seed=1), tensor(80, seed=2)
    fused(lambda x, w, b: F.gelu(F.linear(x, w, b)), *(t.to(dtype) for t in (x, w, b)))


@pytest.mark.parametrize("rows", (1, 2, 8, 15))
def test_swiglu_of_few_rows(rows: int) -> None:
    x, a, b = tensor(rows, 64), tensor(72, 64, seed=1), tensor(72, 64, seed=2)
    fused(lambda x, a, b: F.silu(x @ a.t()) * (x @ b.t()), *(t.bfloat16() for t in (x, a, b)))


def test_a_product_of_few_columns_and_few_terms() -> None:
    x, w, r = tensor(70, 5), tensor(5, 3, seed=1), tensor(70, 3, seed=2)
    fused(lambda x, w, r: torch.tanh(x @ w + r), x, w, r)


@pytest.mark.sampled(5)
@TYPES
@pytest.mark.parametrize("terms", (1024, 1300))
def test_parts_of_a_product_with_bias_gelu_and_residual(split, terms, dtype) -> None:
    x, w, b = tensor(20, terms), tensor(48, terms, seed=1) / 8, tensor(48, seed=2)
    inputs = (t.to(dtype) for t in (x, w, b, tensor(20, 48, seed=3)))
    fused(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, *inputs)


def test_parts_of_two_products_that_share_their_rows(split) -> None:
    x, a, b = tensor(3, 1100), tensor(40, 1100, seed=1) / 8, tensor(40, 1100, seed=2) / 8
    inputs = (t.bfloat16() for t in (x, a, b))
    fused(lambda x, a, b: F.silu(x @ a.t()) * (x @ b.t()), *inputs)


def test_parts_of_a_product_of_any_length(split) -> None:
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(x @ w + b)

    for terms in (1536, 1030):
        x, w = tensor(4, terms), tensor(terms, 32, seed=1) / 8
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(w, 0)
        fused(layer, x, w, tensor(32, seed=2), dynamic=True)


def test_several_results_of_a_product_in_parts(split) -> None:
    def several(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        return y, F.relu(y), (y * 0.5).bfloat16()

    fused(several, tensor(7, 1200), tensor(1200, 33, seed=1))


# -- one query, or few -----------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def heads(keys: int, groups: int, dtype: torch.dtype, *, queries: int = 1) -> list[Tensor]:
    q = tensor(2, 2 * groups, queries, 32, dtype=dtype)
    return [q, *(tensor(2, 2, keys, 32, dtype=dtype, seed=s) for s in (1, 2))]


@pytest.mark.sampled(5)  # a diagonal
@TYPES
@pytest.mark.parametrize("groups", (1, 4))
def test_one_query_reads_its_keys_in_one_loop(whole, groups: int, dtype) -> None:
    fused(attention, *heads(100, groups, dtype))


@pytest.mark.sampled(5)
@TYPES
@pytest.mark.parametrize("groups", (1, 4))
@pytest.mark.parametrize("keys", (pytest.param(768, marks=pytest.mark.slow), 1000))
def test_one_query_whose_keys_are_split(split, keys: int, groups: int, dtype) -> None:
    fused(attention, *heads(keys, groups, dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("queries", (2, 5))
def test_few_queries_whose_keys_are_split(split, queries: int) -> None:
    fused(attention, *heads(700, 1, torch.bfloat16, queries=queries))


def test_a_long_cache_of_keys(split) -> None:
    fused(attention, *(t[:1, :2] for t in heads(2000, 1, torch.bfloat16)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("groups", (1, 4))
def test_parts_that_a_mask_hides_wholly_count_nothing(split, groups: int) -> None:
    mask = torch.zeros(2, 1, 1, 700, dtype=torch.bool)
    mask[0, ..., 300:330] = True  # of the second batch no key is left
    fused(attention, *heads(700, groups, torch.float32), mask)


def test_a_mask_by_position_and_scores_that_are_added_to(split) -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.2 + bias
        hidden = torch.arange(900) > 520
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v

    q, k, v = heads(900, 1, torch.float32, queries=3)
    fused(decode, q, k, v, tensor(2, 2, 3, 900, seed=5))


@pytest.mark.slow
def test_a_cache_of_any_length(split) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, kv: attention(q, *kv), backend="triton_fused")
    for keys in (1100, 600, 1100):
        q, k, v = heads(keys, 4, torch.float32)
        cache = torch.stack((k, v))
        torch._dynamo.mark_dynamic(cache, 3)
        expected = attention(*(t.double() for t in (q, k, v)))
        torch.testing.assert_close(compiled(q, cache).double(), expected, rtol=1e-5, atol=1e-6)
    assert len(split) == 2  # compiled once
