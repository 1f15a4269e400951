"""Models and inputs of tensor classes that override ``__torch_function__`` alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fusec
from fusec.tools.report.arguments import copied
from fusec.tools.report.comparison import compare


class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Tagged))
        self.twin = self.weight
        self.register_buffer("scale", torch.full((8,), 2.0).as_subclass(Tagged))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight * self.scale)


def test_a_module_with_such_tensors_is_copied_with_its_classes() -> None:
    module = Scaled()
    twin = copied(module)
    assert type(twin.weight) is Tagged and type(twin.scale) is Tagged
    assert twin.weight is twin.twin and twin.weight.requires_grad
    assert [name for name, _ in twin.named_parameters()] == ["weight"]
    with torch.no_grad():
        twin.weight.zero_()
        assert module.weight.abs().sum() > 0


def test_it_is_explained_in_training_and_checked() -> None:
    report = fusec.explain(Scaled(), torch.randn(4, 8), train=True)
    assert [len(graph.kernels) for graph in report.graphs] == [1, 1]
    assert not compare(Scaled(), [torch.randn(4, 8)]).faults


def test_an_input_of_such_a_class_counts_as_a_plain_tensor() -> None:
    given = torch.randn(4, 8).as_subclass(Tagged)
    for train in (False, True):
        graphs = fusec.explain(lambda x: torch.tanh(x * 2) + 1, given, train=train).graphs
        assert [len(graph.kernels) for graph in graphs] == [1] * (1 + train)
