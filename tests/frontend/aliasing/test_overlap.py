"""Which arguments a call of Dynamo's graphs writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusec.frontend.aliasing.overlap import written_by
from tests.support import BACKEND, check, values

A, W = values(3, 9, 5), values(5, 5, seed=2) * 0.5
INPLACE = [
    name
    for name, f in vars(F).items()
    if inspect.isfunction(f) and "inplace" in inspect.signature(f).parameters and name[0] != "_"
]


def call(function: Callable, *args: Any, **kwargs: Any) -> tuple[fx.Node, fx.Node]:
    """Return an argument, and a call of which it is the first argument."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    return given, graph.call_function(function, (given, *args), kwargs)


@pytest.mark.parametrize("name", INPLACE)
def test_a_function_writes_its_argument_if_told_so_by_name_or_by_position(name: str) -> None:
    function = getattr(F, name)
    parameters = [*inspect.signature(function).parameters.values()]
    place = next(k for k, one in enumerate(parameters) if one.name == "inplace")
    between = [1.0 if p.default is inspect.Parameter.empty else p.default for p in parameters]
    for value in (True, False):
        x, by_position = call(function, *between[1:place], value)
        assert written_by(by_position) == ([x] if value else [None])
        x, by_name = call(function, *between[1:place], inplace=value)
        assert written_by(by_name) == ([x] if value else [None])


def test_an_embedding_with_a_greatest_norm_writes_its_weight() -> None:
    for function in (F.embedding, F.embedding_bag):
        graph = fx.Graph()
        places, weight = map(graph.placeholder, ("places", "weight"))
        assert written_by(graph.call_function(function, (places, weight, None, 0.5))) == [weight]
        assert written_by(graph.call_function(function, (places, weight))) == [None]


def test_a_greatest_norm_of_a_function_without_weight_writes_nothing() -> None:
    def clipped(x: Tensor, max_norm: float) -> Tensor:
        return x / x.norm().clamp(min=max_norm)

    _, node = call(clipped, 1.0)
    assert all(argument is None for argument in written_by(node))


@pytest.mark.skipif(BACKEND != "fusec", reason="about fusec's own rewrites of Dynamo's graphs")
def test_loops_in_which_a_function_writes_its_argument_match_eager() -> None:
    def activation(a: Tensor, w: Tensor) -> Any:
        h, before, states = a.new_zeros(3, 5), [], []
        for t in range(9):
            y = h @ w + a[:, t]
            h = F.relu(y, True) + y
            before.append(y)
            states.append(h)
        return torch.stack(before), torch.stack(states)

    def embedding(places: Tensor, table: Tensor, w: Tensor) -> Any:
        h, states = w.new_zeros(3, 5), []
        for t in range(9):
            other = F.embedding(places[:, (t + 3) % 9], table, None, 0.5)
            h = torch.tanh(h @ w + table[places[:, t]] + other)
            states.append(h)
        return torch.stack(states)

    check(activation, A, W)
    check(embedding, torch.arange(27).view(3, 9) % 7, values(7, 5), W)
