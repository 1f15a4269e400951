"""Groups of kernels with decomposed products: their members, and the decision on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusec
from fusec.passes.fusion import contract
from fusec.tools.report.explanation import GraphReport
from tests.calls import calls_of

BF16 = torch.bfloat16


def _explained(fn: Callable[..., Any], *shapes: tuple[int, ...], race: str = "auto") -> GraphReport:
    inputs = [torch.empty(shape, dtype=BF16) for shape in shapes]
    (report,) = fusec.explain(fn, *inputs, target="sm_90", race=race).graphs
    return report


def with_statistics(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = F.linear(x, w) + r
    variance, mean = torch.var_mean(h.float(), -1, correction=0)
    return h, mean, torch.rsqrt(variance + 1e-5)


def softmax_over_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.mT * 0.125, -2) @ v


ROWS = ((4096, 1024), (1024, 1024), (4096, 1024))
HEADS = ((2, 8, 1024, 64),) * 3


def test_a_sum_in_parts_of_a_products_rows_is_judged_with_its_product():
    report = _explained(with_statistics, *ROWS)
    (verdict,) = [d for d in report.decisions if "modelled: fused" in d.reason]
    assert verdict.taken, verdict
    assert not report.externs
    assert report.bytes_moved < 0.7 * _explained(with_statistics, *ROWS, race="library").bytes_moved


@pytest.mark.parametrize(
    ("fn", "shapes"),
    ((with_statistics, ROWS), (softmax_over_queries, HEADS)),
    ids=("rows", "heads"),
)
def test_each_decomposed_product_leaves_a_verdict(fn, shapes):
    report = _explained(fn, *shapes)
    assert any("the library and the rest" in d.reason for d in report.decisions), report.decisions


@pytest.mark.parametrize("layers", (2, 4))
def test_layers_that_are_alike_are_judged_once(layers):
    def residual(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for w in weights:
            x = F.gelu(x @ w) + x
        return x

    with calls_of(contract.modelled_us) as modelled:
        report = _explained(residual, *((1024, 1024),) * (layers + 1))
    assert len([d for d in report.decisions if "modelled: fused" in d.reason]) == layers
    assert len(modelled) == 1
