"""Multiply-adds of eager kernels, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.tools.summary import multiplied

aten = torch.ops.aten


def node(call: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> fx.Node:
    """Return the call of a traced function that multiplies."""
    graph = make_fx(call, tracing_mode=mode)(*inputs).graph
    calls: list[fx.Node] = [n for n in graph.nodes if n.op == "call_function"]
    return calls[-1]


ATTENDED = [torch.randn(2, 4, 16, 8) for _ in range(3)]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_product_multiplies_rows_columns_and_terms(mode: str) -> None:
    call = node(torch.mm, torch.randn(8, 64), torch.randn(64, 32), mode=mode)
    assert multiplied(call) == {"f32": 8 * 64 * 32}


def test_a_convolution_multiplies_its_window() -> None:
    image, weight = torch.randn(2, 3, 10, 10).bfloat16(), torch.randn(5, 3, 3, 3).bfloat16()
    call = node(lambda x, w: aten.convolution(x, w, None, [1] * 2, [1] * 2, [1] * 2, False, [0] * 2,
                                              1), image, weight)  # fmt: skip
    assert multiplied(call) == {"bf16": 2 * 5 * 100 * 27}


def test_a_cpu_s_attention_counts_as_any_attention_does() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)  # type: ignore[no-any-return]

    calls = make_fx(attend, tracing_mode="fake")(*ATTENDED).graph.nodes
    (call,) = [n for n in calls if "attention" in str(n.target)]
    assert multiplied(call) == {"f32": 2 * 2 * 4 * 16 * 16 * 8}


def test_what_has_no_formula_multiplies_nothing() -> None:
    assert multiplied(node(torch.sort, torch.randn(8))) == {}
    assert multiplied(node(lambda x: x.sin(), torch.randn(8))) == {}
