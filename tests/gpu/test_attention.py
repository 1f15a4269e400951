"""Attention in fusec's own kernels on a device, forward and backward, in several spellings."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support import HALF, check, values

pytestmark = pytest.mark.gpu

MODES = pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setenv("FUSEC_RACE", "fused")


def heads(length, width, *, batch=2, count=4, shared=None, keys=None, dtype=torch.bfloat16):
    """q [batch, count, length, width]; k and v with `shared` heads of `keys` rows."""
    shared, keys = shared or count, keys or length
    shapes = ((batch, count, length, width), *[(batch, shared, keys, width)] * 2)
    return [values(*s, seed=i).to(dtype).cuda() for i, s in enumerate(shapes)]


def scores(q, k):
    return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5


def distances(q):
    place = torch.arange(q.shape[-2], device=q.device)
    return place[:, None] - place


def causal(q, k, v):
    return scores(q, k).masked_fill(distances(q) < 0, float("-inf")).softmax(-1) @ v


def where_causal(q, k, v):
    s = torch.where(distances(q) >= 0, scores(q, k), torch.finfo(q.dtype).min)
    return torch.softmax(s.float(), -1).to(q.dtype) @ v


def alibi(q, k, v):
    slopes = 2.0 ** -torch.arange(1.0, 1 + q.shape[1], device=q.device)
    bias = (slopes[:, None, None] * -distances(q)).to(q.dtype)
    return (scores(q, k) + bias).masked_fill(distances(q) < 0, float("-inf")).softmax(-1) @ v


def soft_cap(q, k, v):
    return (30 * torch.tanh(scores(q, k) / 30)).softmax(-1) @ v


def library_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


SPELLINGS = (library_causal, causal, where_causal, alibi, soft_cap)


@MODES
@pytest.mark.parametrize("attend", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings(attend, train):
    # Scores of under a MiB would be saved for the backward, not computed again.
    check(attend, *heads(400, 64), train=train, tol=2e-2)


@pytest.mark.parametrize("width", (32, 80, 128, 256))
def test_head_widths(width):
    check(library_causal, *heads(160, width), tol=2e-2)


@pytest.mark.parametrize("length", (1, 17, 64, 129, 1024))
def test_lengths(length):
    check(library_causal, *heads(length, 64), train=True, tol=2e-2)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=str)
def test_types(dtype):
    check(causal, *heads(96, 64, dtype=dtype), train=True, tol=2e-2 if dtype in HALF else 1e-4)


@MODES
def test_an_additive_bias(train):
    q, k, v = heads(130, 64)
    bias = values(1, 4, 130, 130, seed=7).bfloat16().cuda()
    attend = F.scaled_dot_product_attention
    check(lambda q, k, v, b: attend(q, k, v, attn_mask=b), q, k, v, bias, train=train, tol=2e-2)


@MODES
def test_grouped_heads_of_other_length(train):
    q, k, v = heads(100, 64, count=8, shared=2, keys=160)
    attend = F.scaled_dot_product_attention
    check(lambda *a: attend(*a, enable_gqa=True), q, k, v, train=train, tol=2e-2)


def test_rows_that_see_no_key():
    q, k, v = heads(64, 64)
    mask = torch.rand(64, 64, device="cuda") > 0.5
    mask[3] = False
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), q, k, v,
          tol=2e-2)  # fmt: skip


def test_one_query_as_in_decoding():
    attend = F.scaled_dot_product_attention
    check(lambda q, k, v: attend(q, k, v), *heads(1, 128, keys=1000), tol=2e-2)


def test_lengths_that_are_symbols():
    check(library_causal, *heads(130, 64), dynamic=True, train=True, tol=2e-2)
