"""How a row is made of a model and its inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.workload import DEPLOYED, Case, Workload, modes
from bench.workloads.blocks import default_dtype
from bench.workloads.convnets import ConvNeXtBlock

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
Make = Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]
"""Makes a model and its inputs; sizes are divided by the argument for dry runs."""


def measured(group: str, name: str, make: Make, *, trained: bool = True) -> list[Workload]:
    """Return a model's rows: forward, where runtimes are peers, and in training."""
    rows = modes(group, name, functools.partial(built, make=make), inference=DEPLOYED)
    return rows if trained else rows[:1]


def built(dtype: torch.dtype, device: str, shrink: int, *, make: Make) -> Case:
    with torch.device(device), default_dtype(dtype):
        model, inputs = make(shrink)
    if not isinstance(model, Output):  # models of transformers have begun as they do
        model.apply(begin)
    return Case(model, inputs)


def begin(module: nn.Module) -> None:
    """Give weights a size at which deep networks neither fade nor grow: else no error is seen."""
    if isinstance(module, CONVOLUTIONS):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    elif isinstance(module, ConvNeXtBlock):
        nn.init.constant_(module.scale, 0.5)  # 1e-6 at first: what blocks compute would not count


def images(batch: int, height: int, width: int | None = None) -> tuple[Tensor]:
    """Return [batch, 3, height, width], square by default."""
    return (torch.randn(batch, 3, height, width or height),)


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (batch, length))


class Output(nn.Module):
    """A model of transformers: tensors in order to one tensor of its result."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], result: str) -> None:
        super().__init__()
        self.model, self.names, self.result = model, names, result

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.model(**dict(zip(self.names, inputs, strict=True)))[self.result]
        return found
