"""Which eager calls add no floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.frontend.fallbacks import is_exact

aten = torch.ops.aten
X, ROWS = torch.randn(6, 4), torch.tensor([0, 2])

EXACT: dict[str, Callable[..., Any]] = {
    "sort": lambda x: torch.sort(x).values,
    "topk": lambda x: torch.topk(x, 2).values,
    "integers of floats": lambda x: torch.argsort(x),
    "a view": lambda x: x.transpose(0, 1),
    "an element by itself": lambda x: torch.special.i0(x),
    "a write": lambda x: aten.index_put(x, [ROWS], x[:2]),
    "a scatter that replaces": lambda x: aten.scatter.src(x, 0, ROWS[:, None], x[:2]),
    "a draw": lambda x: torch.bernoulli(x.sigmoid()),
    "a pad": lambda x: aten.reflection_pad1d(x, [1, 1]),
    "memory": lambda x: torch.empty_like(x),
}
ADDS: dict[str, Callable[..., Any]] = {
    "a product": lambda x: x @ x.mT,
    "a sum": lambda x: x.sum(1),
    "a transform": lambda x: torch.fft.rfft(x),
    "a scan": lambda x: torch.cumsum(x, 0),
    "a write that accumulates": lambda x: aten.index_put(x, [ROWS], x[:2], True),
    "a scatter that adds": lambda x: aten.scatter_add(x, 0, ROWS[:, None], x[:2]),
    "a scatter that reduces": lambda x: aten.scatter.reduce(x, 0, ROWS[:, None], x, reduce="add"),
    "a decomposition": lambda x: torch.linalg.eigvalsh(x.mT @ x),
    "a pad's gradient": lambda x: aten.reflection_pad1d_backward(x, x[:, 1:3], [1, 1]),
}


def last(f: Callable[..., Any]) -> torch.fx.Node:
    gm = make_fx(f)(X)
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and "getitem" not in n.name]
    return calls[-1]


@pytest.mark.parametrize("name", EXACT)
def test_a_call_that_adds_no_floats_is_exact(name: str) -> None:
    assert is_exact(last(EXACT[name]))


@pytest.mark.parametrize("name", ADDS)
def test_a_call_that_adds_floats_is_not(name: str) -> None:
    assert not is_exact(last(ADDS[name]))


def test_an_operation_of_the_user_s_is_not() -> None:
    with torch.library._scoped_library("fusec_test_exact", "DEF") as library:
        library.define("own(Tensor x) -> Tensor")
        library.impl("own", lambda x: x * 1, "CompositeExplicitAutograd")
        library.impl("own", lambda x: torch.empty_like(x), "Meta")
        target = torch.ops.fusec_test_exact.own
        assert not is_exact(last(lambda x: target(x)))
