"""Runtimes of exported programs, where they are installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import runtimes
from bench.workload import compiled


class Degrees(nn.Module):
    """A linear layer's rows, added up by index: what OpenVINO takes as ONNX alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.layer(x)
        return made, torch.zeros_like(made).index_add(0, places, made)


@pytest.mark.parametrize("runtime", runtimes.RUNTIMES)
def test_a_runtime_computes_what_eager_does(runtime: str) -> None:
    pytest.importorskip(runtime)
    model = Degrees().requires_grad_(False)
    made = compiled(model, runtime)
    for seed in (0, 1):
        torch.manual_seed(seed)
        given = torch.randn(4, 8), torch.tensor([1, 1, 3, seed])
        torch.testing.assert_close(tuple(made(*given)), model(*given))
