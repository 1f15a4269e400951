"""A residual sum and its LayerNorm: `fusec explain examples/norm.py:Norm --input ...`."""

from __future__ import annotations

from torch import Tensor, nn


class Norm(nn.Module):
    """``h = x + r`` of shape ``[m, 1024]``, and its LayerNorm."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        h = x + r
        return self.norm(h), h
