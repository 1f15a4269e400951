"""Convolutional networks of the usual kinds, from images to classes, in both memory formats."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from bench.workload import FROZEN, Case, Workload, modes
from bench.workloads.blocks import default_dtype
from bench.workloads.vision import UNet

GROUP = "convnets"


def convolution(
    inputs: int, outputs: int, side: int, stride: int, act: type[nn.Module] | None, groups: int = 1
) -> nn.Sequential:
    """A convolution, its norm, and an activation if there is one."""
    conv = nn.Conv2d(inputs, outputs, side, stride, side // 2, groups=groups, bias=False)
    norm = nn.BatchNorm2d(outputs)
    return nn.Sequential(conv, norm, *([] if act is None else [act()]))


class Squeeze(nn.Module):
    """Squeeze and excitation: each channel times what all channels' means say (Hu et al., 2018)."""

    def __init__(
        self, channels: int, inner: int, act: type[nn.Module], gate: type[nn.Module]
    ) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)
        self.act, self.gate = act(), gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.up(self.act(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """Wide, depthwise, narrow (Sandler et al., 2018), with squeeze and excitation or without."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        side: int,
        stride: int,
        act: type[nn.Module],
        squeeze: Squeeze | None,
    ) -> None:
        super().__init__()
        inputs, wide, outputs = shape
        self.body = nn.Sequential(
            *([] if wide == inputs else [convolution(inputs, wide, 1, 1, act)]),
            convolution(wide, wide, side, stride, act, wide),
            *([] if squeeze is None else [squeeze]),
            convolution(wide, outputs, 1, 1, None),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class MobileNet(nn.Module):
    """MobileNetV3 (Howard et al., 2019): the large one, or the small one."""

    LARGE = (
        (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2),
        (5, 120, 40, 1, 0, 1), (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1),
        (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 480, 112, 1, 1, 1),
        (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1),
        (5, 960, 160, 1, 1, 1),
    )  # fmt: skip
    SMALL = (
        (3, 16, 16, 1, 0, 2), (3, 72, 24, 0, 0, 2), (3, 88, 24, 0, 0, 1), (5, 96, 40, 1, 1, 2),
        (5, 240, 40, 1, 1, 1), (5, 240, 40, 1, 1, 1), (5, 120, 48, 1, 1, 1), (5, 144, 48, 1, 1, 1),
        (5, 288, 96, 1, 1, 2), (5, 576, 96, 1, 1, 1), (5, 576, 96, 1, 1, 1),
    )  # fmt: skip
    """Kernel, width, outputs, squeeze, hardswish, stride."""

    def __init__(self, *, small: bool = False) -> None:
        super().__init__()
        rows, hidden = (self.SMALL, 1024) if small else (self.LARGE, 1280)
        blocks, channels = [], 16
        for side, wide, outputs, squeeze, hard, stride in rows:
            gate = Squeeze(wide, wide // 4, nn.ReLU, nn.Hardsigmoid) if squeeze else None
            act = nn.Hardswish if hard else nn.ReLU
            blocks.append(Inverted((channels, wide, outputs), side, stride, act, gate))
            channels = outputs
        last = 6 * channels
        self.features = nn.Sequential(
            convolution(3, 16, 3, 2, nn.Hardswish),
            *blocks,
            convolution(channels, last, 1, 1, nn.Hardswish),
        )
        self.head = nn.Sequential(
            nn.Linear(last, hidden), nn.Hardswish(), nn.Linear(hidden, 1000)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class EfficientNet(nn.Module):
    """EfficientNet-B0 (Tan and Le, 2019)."""

    ROWS = (
        (3, 1, 16, 1, 1), (3, 6, 24, 2, 2), (5, 6, 40, 2, 2), (3, 6, 80, 3, 2), (5, 6, 112, 3, 1),
        (5, 6, 192, 4, 2), (3, 6, 320, 1, 1),
    )  # fmt: skip
    """Kernel, times wider, outputs, blocks, stride of the first."""

    def __init__(self) -> None:
        super().__init__()
        blocks, channels = [], 32
        for side, times, outputs, count, stride in self.ROWS:
            for number in range(count):
                wide = times * channels
                gate = Squeeze(wide, channels // 4, nn.SiLU, nn.Sigmoid)
                shape = (channels, wide, outputs)
                blocks.append(Inverted(shape, side, 1 if number else stride, nn.SiLU, gate))
                channels = outputs
        self.features = nn.Sequential(
            convolution(3, 32, 3, 2, nn.SiLU), *blocks, convolution(320, 1280, 1, 1, nn.SiLU)
        )
        self.head = nn.Linear(1280, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution of 7x7, then norm and MLP of each place's channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class Norm2d(nn.LayerNorm):
    """LayerNorm of the channels of images [n, c, h, w]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """ConvNeXt (Liu et al., 2022), of the width of its smallest and less deep."""

    def __init__(
        self, depths: tuple[int, ...] = (1, 1, 3, 1), widths: tuple[int, ...] = (96, 192, 384, 768)
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), Norm2d(widths[0], eps=1e-6)]
        for place, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if place:
                layers += [Norm2d(widths[place - 1]), nn.Conv2d(widths[place - 1], width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.features = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.features(x).mean((2, 3))))


class Residual(nn.Module):
    """Two convolutions of 3x3 beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride, nn.ReLU)
        self.second = convolution(outputs, outputs, 3, 1, None)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else convolution(inputs, outputs, 1, stride, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(self.first(x)) + self.short(x))


class ResNet(nn.Module):
    """ResNet-18 (He et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        rows = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        blocks = [Residual(*row) for row in (*rows, (256, 512, 2), (512, 512, 1))]
        self.stem = convolution(3, 64, 7, 2, nn.ReLU)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.max_pool2d(self.stem(x), 3, 2, 1))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def convnet(
    dtype: torch.dtype,
    device: str,
    shrink: int,
    *,
    module: type[nn.Module],
    size: int,
    layout: torch.memory_format,
) -> Case:
    """A network on [4, 3, size, size], which and whose weights lie in a memory format."""
    with torch.device(device), default_dtype(dtype):
        made = module().to(memory_format=layout)
    x = torch.randn(max(2, 4 // shrink), 3, size, size, device=device).to(dtype)
    return Case(made, (x.contiguous(memory_format=layout),))


NETWORKS = {
    "mobilenet": (MobileNet, 224),
    "efficientnet": (EfficientNet, 224),
    "convnext": (ConvNeXt, 224),
    "resnet": (ResNet, 224),
    "unet": (UNet, 128),
}
FORMATS = {"": torch.contiguous_format, " channels last": torch.channels_last}


def cpu() -> list[Workload]:
    return [
        workload
        for name, (module, size) in NETWORKS.items()
        for suffix, layout in FORMATS.items()
        for workload in modes(
            GROUP,
            f"{name} 4x{size}x{size}{suffix}",
            functools.partial(convnet, module=module, size=size, layout=layout),
            inference=FROZEN,
        )
    ]
