"""Exponentials of an attention as powers of two: what is printed, and that values stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tests.triton_backend  # noqa: F401 (registers the backends)
from fusec.codegen.triton.base_two import HUGE
from tests.codegen.test_contraction_static import staged, tensors
from tests.support import check, values


def _sources(dtype: torch.dtype, fn=F.scaled_dot_product_attention) -> list[str]:
    (one,) = staged(fn, *tensors(*[(32, 8, 256, 64)] * 3, dtype=dtype))
    assert one.compiled is not None
    return list(one.compiled.sources.values())


def test_the_scale_and_the_base_of_the_logarithm_are_one_factor_of_a_score() -> None:
    (source,) = _sources(torch.bfloat16)
    assert f"* {0.125 * 1.4426950408889634}" in source
    assert "libdevice" not in source


def test_exponentials_of_exact_scores_stay_exact() -> None:
    source = "".join(_sources(torch.float32))
    assert "libdevice.exp" in source and "1.44" not in source


def hidden(fill: float):
    def attention(q, k, v):
        scores = (q @ k.mT).float() * 0.125
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return torch.softmax(scores.masked_fill(mask, fill), -1).to(v.dtype) @ v

    return attention


def biased(q, k, v):
    return torch.softmax((q @ k.mT).float() + q[..., :1], -1).to(v.dtype) @ v


def capped(q, k, v):
    return torch.softmax((q @ k.mT).float().div(9).tanh() * 9, -1).to(v.dtype) @ v


@pytest.mark.parametrize(
    ("fn", "compared"),
    (
        (hidden(-1e9), True),
        (hidden(-1e8), True),
        (biased, True),
        (hidden(-torch.inf), False),
        (hidden(-1e4), False),
        (capped, False),
    ),
    ids=("huge", "huge if added twice", "memory", "minus infinity", "small", "a soft cap"),
)
def test_rows_are_compared_with_a_huge_number_only_if_one_may_mask_them(fn, compared: bool) -> None:
    assert (str(HUGE) in "".join(_sources(torch.bfloat16, fn))) is compared


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("scale", (0.125, 3.0))
def test_values_of_large_scores(dtype: torch.dtype, scale: float) -> None:
    q, k, v = (values(1, 2, n, 16, seed=s).to(dtype) for s, n in enumerate((48, 70, 70)))

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q * 8, k, v, scale=scale)

    check(attention, q, k, v, backend="triton_fused")


@pytest.mark.parametrize("fill", (-1e9, torch.finfo(torch.bfloat16).min))
def test_rows_whose_scores_are_all_masked_are_uniform(fill: float) -> None:
    q, k, v = (values(1, 2, n, 16, seed=s).bfloat16() for s, n in enumerate((40, 16, 16)))
    mask = torch.zeros(40, 16).masked_fill(torch.arange(40)[:, None] > torch.arange(16), fill)

    def attention(q, k, v, mask):
        scores = q @ k.mT * 0.3
        filled = torch.softmax(scores.masked_fill(mask < 0, fill), -1) @ v
        return filled, torch.softmax(scores + mask, -1) @ v

    check(attention, q, k, v, mask.bfloat16(), backend="triton_fused")
