"""Linears whose weights are integers, on CPUs, written out in plain torch."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from bench.workload import Case, Workload

GROUP = "integer weights on CPUs"


class Int8(nn.Module):
    """``F.linear(x, w.to(x.dtype)) * scale``, with a scale for each column."""

    def __init__(self, terms: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-128, 128, (columns, terms), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(columns).to(dtype) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w.to(x.dtype)) * self.scale


class Int4(nn.Module):
    """Two weights in a byte, and a scale for each group of 128 terms of a column."""

    def __init__(self, terms: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        groups = max(1, terms // 128)
        packed = torch.randint(0, 256, (columns, terms // 2), dtype=torch.uint8)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", torch.rand(columns, groups).to(dtype) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns, groups = self.scale.shape
        codes = torch.stack([self.packed & 15, self.packed >> 4], -1).to(torch.int8) - 8
        w = codes.view(columns, groups, -1).to(x.dtype) * self.scale[..., None]
        return F.linear(x, w.reshape(columns, -1))


class Dynamic(Int8):
    """Rows quantised by their largest magnitude, a product of int8, scales and GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = x.abs().amax(1, keepdim=True).float().clamp(min=1e-5) / 127
        codes = (x / step).round().clamp(-127, 127).to(torch.int8)
        return F.gelu((torch._int_mm(codes, self.w.t()) * step * self.scale).to(x.dtype))


def linear(
    dtype: torch.dtype, device: str, shrink: int, *, kind: type[nn.Module], rows: int
) -> Case:
    side = max(128, 4096 // shrink)
    return Case(kind(side, side, dtype), (torch.randn(rows, side).to(dtype),))


def cpu() -> list[Workload]:
    rows = [(kind, m) for kind in (Int8, Int4) for m in (1, 16, 128)] + [(Dynamic, 128)]
    return [
        Workload(
            GROUP,
            f"{kind.__name__.lower()} linear {m} rows",
            partial(linear, kind=kind, rows=m),
            dtype="bf16",
        )
        for kind, m in rows
    ]
