"""A UNet that predicts noise, in training: norms over groups, attention over places, long skips.

``denoiser`` is diffusers' ``UNet2DModel`` where that is installed; else what is built here, of the
same parts and widths.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 8


class Residual(nn.Module):
    def __init__(self, given: int, made: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, given), nn.Conv2d(given, made, 3, padding=1)
        self.time = nn.Linear(time, made)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, made), nn.Conv2d(made, made, 3, padding=1)
        self.shortcut = nn.Identity() if given == made else nn.Conv2d(given, made, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(2).transpose(1, 2)
        heads = [f(rows).unflatten(2, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        made = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x + self.out(made).transpose(1, 2).reshape(x.shape)


class Stage(nn.Module):
    """Residual blocks, one for each width that comes in, with attention behind each or without."""

    def __init__(self, given: tuple[int, ...], made: int, time: int, *, attends: bool) -> None:
        super().__init__()
        self.residuals = nn.ModuleList(Residual(width, made, time) for width in given)
        self.attentions = nn.ModuleList(Attention(made) for _ in given if attends)

    def block(self, k: int, x: Tensor, t: Tensor) -> Tensor:
        x = self.residuals[k](x, t)
        return self.attentions[k](x) if self.attentions else x


class Unet(nn.Module):
    def __init__(self, widths: tuple[int, int, int]) -> None:
        super().__init__()
        a, b, c = widths
        self.width, time = a, 4 * a
        self.time = nn.Sequential(nn.Linear(a, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, a, 3, padding=1)
        self.down = nn.ModuleList([
            Stage((a,), a, time, attends=False),
            Stage((a,), b, time, attends=True),
            Stage((b,), c, time, attends=False),
        ])  # fmt: skip
        self.smaller = nn.ModuleList(nn.Conv2d(n, n, 3, 2, 1) for n in (a, b))
        self.middle = Stage((c, c), c, time, attends=True)
        self.up = nn.ModuleList([
            Stage((c + c, c + b), c, time, attends=False),
            Stage((c + b, b + a), b, time, attends=True),
            Stage((b + a, a + a), a, time, attends=False),
        ])  # fmt: skip
        self.larger = nn.ModuleList(nn.Conv2d(n, n, 3, padding=1) for n in (c, b))
        self.last = nn.Sequential(nn.GroupNorm(GROUPS, a), nn.SiLU(), nn.Conv2d(a, 3, 3, padding=1))

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        waves = torch.exp(torch.arange(self.width // 2) * (-9.2 / (self.width // 2)))
        angles = steps[:, None] * waves
        t = self.time(torch.cat((angles.cos(), angles.sin()), 1))
        x = self.first(x)
        skips = [x]
        for k, stage in enumerate(self.down):
            x = stage.block(0, x, t)
            skips.append(x)
            if k < len(self.smaller):
                x = self.smaller[k](x)
                skips.append(x)
        for k in range(2):
            x = self.middle.block(k, x, t)
        for k, stage in enumerate(self.up):
            for n in range(2):
                x = stage.block(n, torch.cat((x, skips.pop()), 1), t)
            if k < len(self.larger):
                x = self.larger[k](F.interpolate(x, scale_factor=2.0))
        return self.last(x)


def denoiser(widths: tuple[int, int, int]) -> tuple[nn.Module, Callable[[nn.Module], Callable]]:
    """Return a model, and what makes ``(images, steps) -> noise`` of it as it is or compiled."""
    if importlib.util.find_spec("diffusers") is None:
        return Unet(widths), lambda model: model
    from diffusers import UNet2DModel  # local: no dependency of fusec's

    plain, attends = "{}Block2D", "Attn{}Block2D"
    model = UNet2DModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=widths,
        down_block_types=[kind.format("Down") for kind in (plain, attends, plain)],
        up_block_types=[kind.format("Up") for kind in (plain, attends, plain)],
        norm_num_groups=GROUPS,
    )
    return model, lambda made: lambda x, steps: made(x, steps).sample
