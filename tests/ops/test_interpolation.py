"""Interpolation: its forward fuses; its gradient is one operation, not a scatter for each part."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support import check, compile_with, externs, values, with_layout

WAYS: dict[str, dict[str, Any]] = {
    "nearest": {"scale_factor": 2},
    "nearest, by 3 and 7": {"scale_factor": (3.0, 7.0)},
    "nearest, to a size": {"size": (10, 24)},
    "nearest, by no whole number": {"scale_factor": 1.7},
    "nearest, smaller": {"scale_factor": 0.5},
    "bilinear": {"scale_factor": 2, "mode": "bilinear"},
    "bilinear, smaller": {"size": 4, "mode": "bilinear"},
    "scale again": {"scale_factor": 1.7, "mode": "bilinear", "recompute_scale_factor": True},
    "corners": {"size": 9, "mode": "bilinear", "align_corners": True},
    "bicubic": {"scale_factor": 1.7, "mode": "bicubic"},
    "antialias": {"size": (4, 3), "mode": "bilinear", "antialias": True},
    "area": {"size": (3, 2), "mode": "area"},
}


def test_an_interpolation_and_its_gradient_are_eager_s() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        planes = [F.interpolate(x * 2, **way).tanh() for way in WAYS.values()]
        line, volume = x[:, :, 0], torch.stack([x, x * 2], -1)
        return [
            *planes,
            F.interpolate(line, scale_factor=3, mode="nearest-exact"),
            F.interpolate(line, size=11, mode="linear"),
            F.interpolate(volume, scale_factor=2),
        ]

    check(fn, values(2, 3, 5, 6), train=True)


def test_in_channels_last_and_in_16_bits() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [F.interpolate(x, scale_factor=2), F.interpolate(y, scale_factor=2, mode="bilinear")]

    x = with_layout(values(2, 16, 5, 6), "channels_last")
    check(fn, x, x.bfloat16(), train=True)


def test_a_gradient_of_the_nearest_neighbour_is_a_sum_and_any_other_eager_s() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        larger = F.interpolate(x, scale_factor=2)
        return [larger, F.interpolate(x, size=(7, 9)), F.interpolate(x, size=9, mode="bilinear")]

    found = [name for name, _ in externs(fn, values(2, 3, 5, 6), train=True)]
    gradients = ["upsample_bilinear2d_backward.default", "upsample_nearest2d_backward.default"]
    assert sorted(found) == gradients


def test_sizes_that_vary_and_a_forward_that_runs_again() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: F.interpolate(x.sin(), scale_factor=2), x, use_reentrant=False)
        return F.interpolate(x, scale_factor=1.5, mode="bilinear")

    check(fn, values(2, 3, 5, 6), train=True, dynamic=True, more=[(values(2, 3, 7, 9),)])


def test_transforms_take_interpolation_as_torch_does() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda x: F.interpolate(x, scale_factor=2).sum()))(x)

    x = values(2, 1, 3, 4, 4)
    assert torch.equal(compile_with(fn)(x), fn(x))


def test_a_gradient_called_by_name_enlarges_by_three_and_by_no_whole_number() -> None:
    backward = torch.ops.aten.upsample_nearest2d_backward

    def fn(g):
        return [backward(g, [6, 12], [3, 3, *size]) for size in ((2, 4), (3, 6), (4, 5), (2, 8))]

    check(fn, values(3, 3, 6, 12))
