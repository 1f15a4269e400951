"""A denoising UNet learns to undo noise, and draws images: `fusec run examples/diffusion.py`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    """A module that finds attributes in its configuration, too, as those of diffusers do."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.__dict__["config"] = config

    def __getattr__(self, name: str) -> Any:
        config = self.__dict__.get("config", {})
        return config[name] if name in config else super().__getattr__(name)


def embed(times: Tensor, width: int) -> Tensor:
    """Return sines and cosines of times: ``[b]`` to ``[b, width]``."""
    scales = torch.exp(-math.log(10_000.0) * torch.arange(width // 2) / (width // 2))
    angles = times[:, None].float() * scales
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Resnet(nn.Module):
    """Two convolutions, told the time between them."""

    def __init__(self, channels: int, out: int, times: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, out)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(times, out)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Attention of the places of an image."""

    def __init__(self, channels: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(4, channels)
        self.to_qkv, self.to_out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.to_qkv(self.norm(x).flatten(2).transpose(1, 2))
        q, k, v = y.view(b, h * w, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return x + self.to_out(y).transpose(1, 2).view(b, c, h, w)


class UNet(Model):
    """Down twice, an attention, up twice: each way up joins what the way down had."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__(sample_size=16, in_channels=3)
        times, wide = 4 * channels, 2 * channels
        self.time_embedding = nn.Sequential(
            nn.Linear(channels, times), nn.SiLU(), nn.Linear(times, times)
        )
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        self.down_blocks = nn.ModuleList(
            [Resnet(channels, channels, times), Resnet(channels, wide, times)]
        )
        self.mid_block = Attention(wide)
        self.up_blocks = nn.ModuleList(
            [Resnet(2 * wide, channels, times), Resnet(2 * channels, channels, times)]
        )
        self.conv_out = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        time = self.time_embedding(embed(times, self.conv_in.out_channels))
        x, before = self.conv_in(x), []
        for block in self.down_blocks:
            x = block(x, time)
            before.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid_block(x)
        for block in self.up_blocks:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, before.pop()], dim=1), time)
        return self.conv_out(F.silu(x))


def kept(steps: int = 50) -> Tensor:
    """Return the share of an image's variance that is left after each step of noise."""
    return torch.cumprod(1 - torch.linspace(1e-4, 0.1, steps), 0)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, batch: int = 4) -> float:
    """Return the last loss of training on images of one colour."""
    shares = kept()
    for _ in range(steps):
        images = torch.rand(batch, 3, 1, 1).expand(-1, -1, 16, 16) * 2 - 1
        times, noise = torch.randint(len(shares), (batch,)), torch.randn(batch, 3, 16, 16)
        share = shares[times][:, None, None, None]
        loss = F.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, times), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def draw(model: Any, steps: int, batch: int = 4) -> Tensor:
    """Return images that are made of noise, by DDIM."""
    shares, x = kept(), torch.randn(batch, 3, 16, 16)
    for time in torch.linspace(len(shares) - 1, 1, steps).long():
        now, then = shares[time], shares[time - 1]
        noise = model(x, time.expand(batch))
        image = (x - (1 - now).sqrt() * noise) / now.sqrt()
        x = then.sqrt() * image + (1 - then).sqrt() * noise
    return x.clamp(-1, 1)


def main(steps: int = 8) -> float:
    """Train, draw, and return the last loss."""
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    compiled = torch.compile(model, backend="fusec")
    loss = train(compiled, optimizer, steps)
    images = draw(compiled, steps)
    low, high = images.min().item(), images.max().item()
    print(f"loss {loss:.3f}; images {tuple(images.shape)} between {low:.2f} and {high:.2f}")
    return loss


if __name__ == "__main__":
    main()
