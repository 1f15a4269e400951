"""Whole image models, small ones: what a compile costs and what memory a step needs."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from bench.workload import Case, Workload, modes
from bench.workloads.blocks import default_dtype

GROUP = "models"


class DenseLayer(nn.Module):
    """What a dense block adds: norm, relu, 1x1, norm, relu, 3x3 of all that it has so far."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(4 * growth)
        self.narrow = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.grow = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        h = self.narrow(F.relu(self.norm1(torch.cat(features, 1))))
        return self.grow(F.relu(self.norm2(h)))


class DenseBlock(nn.Module):
    """Each layer sees what came in and what every layer before it added."""

    def __init__(self, channels: int, growth: int, depth: int) -> None:
        super().__init__()
        widths = range(channels, channels + depth * growth, growth)
        self.layers = nn.ModuleList(DenseLayer(width, growth) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Module):
    """Half the channels and half the height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.narrow = nn.Conv2d(channels, channels // 2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(self.narrow(F.relu(self.norm(x))), 2)


class DenseNet(nn.Module):
    """Densely connected convolutional networks (Huang et al., 2017); by default of 121 layers."""

    def __init__(self, depths: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        parts: list[nn.Module] = []
        for place, depth in enumerate(depths):
            if place:
                parts.append(Transition(channels))
                channels //= 2
            parts.append(DenseBlock(channels, growth, depth))
            channels += depth * growth
        self.blocks = nn.Sequential(*parts)
        self.last = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = F.relu(self.last(self.blocks(x)))
        return self.head(x.mean((2, 3)))


def convolutions(channels: int, made: int) -> nn.Sequential:
    """Two convolutions of 3x3, each with norm and relu: a level of a U-Net."""
    return nn.Sequential(
        nn.Conv2d(channels, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(),
        nn.Conv2d(made, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down and up again, a level up beside what its level down saw (Ronneberger et al., 2015)."""

    def __init__(self, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(map(convolutions, [3, *widths], widths))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
        self.up = nn.ModuleList(convolutions(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for level, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if level else x)
            seen.append(x)
        for grow, up, beside in zip(self.grow, self.up, seen[-2::-1], strict=True):
            x = up(torch.cat((beside, grow(x)), 1))
        return self.head(x)


class WindowBlock(nn.Module):
    """A block of Swin: attention within windows of side x side, shifted by half of one or not."""

    def __init__(self, width: int, heads: int, side: int, *, shift: bool) -> None:
        super().__init__()
        self.heads, self.side, self.shift = heads, side, side // 2 if shift else 0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.bias = nn.Parameter(torch.randn((2 * side - 1) ** 2, heads) * 0.02)
        y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        y, x = (p.flatten()[:, None] - p.flatten()[None] + side - 1 for p in (y, x))
        self.register_buffer("apart", y * (2 * side - 1) + x, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        s = self.side
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(b, h // s, s, w // s, s, c).transpose(2, 3).reshape(-1, s * s, c)
        q, k, v = self.qkv(x).view(-1, s * s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5
        scores = scores + self.bias[self.apart].permute(2, 0, 1)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, s * s, c))
        y = y.view(b, h // s, w // s, s, s, c).transpose(2, 3).reshape(b, h, w, c)
        return torch.roll(y, (self.shift, self.shift), (1, 2))


class Swin(nn.Module):
    """Two stages of a shifted-window transformer (Liu et al., 2021), shifts without their mask."""

    def __init__(self, width: int = 96, side: int = 7) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Sequential(
            *(WindowBlock(width, width // 32, side, shift=s) for s in (False, True))
        )
        self.norm, self.merge = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)
        self.second = nn.Sequential(
            *(WindowBlock(2 * width, width // 16, side, shift=s) for s in (False, True))
        )
        self.head = nn.Linear(2 * width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.patches(x).permute(0, 2, 3, 1))
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x = self.second(self.merge(self.norm(torch.cat(corners, -1))))
        return self.head(x.mean((1, 2)))


def image_model(
    dtype: torch.dtype, device: str, shrink: int, *, module: type[nn.Module], batch: int, size: int
) -> Case:
    """A model on [batch, 3, size, size]; dry runs take fewer images, no smaller ones."""
    with torch.device(device), default_dtype(dtype):
        made = module()
    x = torch.randn(max(2, batch // shrink), 3, size, size, device=device).to(dtype)
    return Case(made, (x,))


def cpu() -> list[Workload]:
    swin = functools.partial(image_model, module=Swin, batch=4, size=224)
    return modes(GROUP, "swin 4x224x224", swin)
