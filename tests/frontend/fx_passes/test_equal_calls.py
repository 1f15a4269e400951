"""Equal calls of a joint graph become one; what writes, draws or is returned does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.frontend.fx_passes.equal_calls import share_equal_calls

aten = torch.ops.aten


def calls_left(fn: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    """The calls of a function's graph, those of equal arguments as one."""
    graph: fx.Graph = make_fx(fn, tracing_mode="fake")(*inputs).graph
    share_equal_calls(graph)
    graph.lint()
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_equal_calls_become_one():
    x = torch.randn(3)
    assert calls_left(lambda x: x.sin().exp() + x.sin().exp() * 2, x) == [
        "aten.sin.default", "aten.exp.default", "aten.mul.Tensor", "aten.add.Tensor",
    ]  # fmt: skip


def test_numbers_of_other_types_or_signs_are_not_equal():
    x = torch.arange(3)
    assert calls_left(lambda x: (x * 1, x * 1.0, x * True), x) == ["aten.mul.Tensor"] * 3
    y = torch.ones(3)
    assert calls_left(lambda y: ((y / 0.0) + 1, (y / -0.0) + 1), y) == [
        *["aten.div.Tensor", "aten.add.Tensor"] * 2,
    ]


def test_calls_around_a_write_stay_apart():
    def fn(x: torch.Tensor) -> torch.Tensor:
        before = x.sin() + 1
        x.add_(1)
        return before + (x.sin() + 1)

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.randn(3)
    first = graph.call_function(aten.sin.default, (x,))
    graph.call_function(aten.add_.Tensor, (x, 1))
    second = graph.call_function(aten.sin.default, (x,))
    graph.output(graph.call_function(aten.add.Tensor, (first, second)))
    share_equal_calls(graph)
    assert len(graph.find_nodes(op="call_function", target=aten.sin.default)) == 2


def test_draws_stay_apart():
    x = torch.randn(3)
    found = calls_left(lambda x: torch.rand_like(x) + torch.rand_like(x), x)
    assert found.count("aten.rand_like.default") == 2


def test_what_is_returned_has_memory_of_its_own():
    x = torch.randn(3)
    assert calls_left(lambda x: (x.sin(), x.sin()), x) == ["aten.sin.default"] * 2


def test_a_compile_imports_no_pattern_matcher_of_inductor(monkeypatch: pytest.MonkeyPatch):
    """It takes 0.6 CPU-seconds to import, for a numbering of regions between writes."""
    monkeypatch.setitem(sys.modules, "torch._inductor.pattern_matcher", None)  # no import finds it
    torch._dynamo.reset()
    w = torch.randn(4, 4, requires_grad=True)
    options = {"strict": True, "cache": False}
    f = torch.compile(lambda x: (x @ w).relu().sum(), backend="fusec", options=options)
    f(torch.randn(4, 4)).backward()
