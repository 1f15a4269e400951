"""What stands between the convolutions of an image model: normalisation and pooling."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from bench.workload import Case, Workload, modes

GROUP = "images"


class BatchNormReLU(nn.Module):
    """relu(norm(x)), as ResNets write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(x))


def images(dtype: torch.dtype, device: str, shrink: int, *, size: int) -> torch.Tensor:
    """Return [batch, channels, size, size]."""
    size = max(8, size // shrink)
    return torch.randn(max(1, 8 // shrink), 64, size, size, device=device).to(dtype)


def batchnorm_relu(dtype: torch.dtype, device: str, shrink: int) -> Case:
    norm = BatchNormReLU(64).to(device=device, dtype=dtype).train()
    return Case(norm, (images(dtype, device, shrink, size=56),))


def relu_maxpool(
    dtype: torch.dtype, device: str, shrink: int, *, layout: torch.memory_format
) -> Case:
    """A ResNet's stem behind its first convolution."""
    x = images(dtype, device, shrink, size=112).contiguous(memory_format=layout)
    return Case(lambda x: F.max_pool2d(F.relu(x), 3, 2, 1), (x,))


def cpu() -> list[Workload]:
    planes = functools.partial(relu_maxpool, layout=torch.contiguous_format)
    last = functools.partial(relu_maxpool, layout=torch.channels_last)
    return [
        *modes(GROUP, "batchnorm+relu 8x64x56x56", batchnorm_relu),
        *modes(GROUP, "relu+maxpool 8x64x112x112", planes),
        *modes(GROUP, "relu+maxpool 8x64x112x112 channels last", last),
    ]
