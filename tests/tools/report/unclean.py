"""Five models that Dynamo takes apart, and each again with the remedy that fusec names."""

from __future__ import annotations

import torch
from torch import nn


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            print("layer", number)
        return x


class Item(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        k = y.abs().max().item()
        return torch.tanh(y / (k + 1e-3))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return torch.tanh(y) if y.sum() > 0 else torch.relu(y)


class Chosen(Branch):
    """``Branch`` with its remedy: both sides, and ``torch.where``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return torch.where(y.sum() > 0, torch.tanh(y), torch.relu(y))


class Mask(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


class WholeMask(nn.Module):
    """``Mask`` with its remedy: zeros where it leaves out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, 0) * 2


def plus_one(y: torch.Tensor) -> torch.Tensor:
    return y + 1


noted = torch.compiler.disable(plus_one)


class Disabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(noted(self.a(x)))


class Enabled(Disabled):
    """``Disabled`` with its remedy: the function without ``torch.compiler.disable``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(plus_one(self.a(x)))


class Layered(nn.Module):
    """Layers that Dynamo takes apart, one of which the outer function holds in a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Disabled() for _ in range(2))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.h[1].a
        y = self.h[0](self.norm(x))
        return torch.relu(last(y))
