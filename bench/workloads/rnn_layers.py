"""LSTM and GRU layers of PyTorch, which Dynamo leaves to eager's fused kernels, and a head."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from bench.workload import Case, Workload
from bench.workloads.blocks import default_dtype

GROUP = "recurrent layers on CPUs"


class Layers(nn.Module):
    """Two layers over a sequence; the head reads the last step."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(width, width, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


def layers(dtype: torch.dtype, device: str, shrink: int, *, kind: str) -> Case:
    """Sequences of 128 steps, 16 of them, 128 wide."""
    steps, width = max(8, 128 // shrink), max(16, 128 // shrink)
    with default_dtype(dtype):
        return Case(Layers(kind, width), (torch.randn(16, steps, width).to(dtype),))


def cpu() -> list[Workload]:
    return [
        Workload(GROUP, f"{kind.lower()} 2 layers 16x128x128", partial(layers, kind=kind), train)
        for kind in ("LSTM", "GRU")
        for train in (False, True)
    ]
