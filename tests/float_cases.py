"""Values at which conversions to narrow floats may differ, and what torch makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.dtype import DType

Array = np.ndarray[Any, Any]


def narrowed(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return values as torch rounds them to a type; before 2.13 it does not saturate ``e4m3fn``."""
    layout = dtype.format
    assert layout is not None
    if layout.saturates:
        x = torch.where(x.isnan(), x, x.clamp(-448, 448))
    return x.to(to_torch_dtype(dtype))


def floats_near(exact: Array) -> Array:
    """Return f32 of all kinds: every bf16 and f16, ties of a type and their neighbours, any bits.

    Args:
        exact: the numbers of the type.
    """
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = np.sort(exact[np.isfinite(exact)]).astype("f8")
    ties = ((numbers[1:] + numbers[:-1]) / 2).astype("f4")
    near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    above = numbers[-1] * np.linspace(1, 1.5, 1025).astype("f4")
    any_bits = np.random.default_rng(5).integers(0, 1 << 32, 10**6, "u4").view("f4")
    every = [codes.view(kind).float().numpy() for kind in (torch.bfloat16, torch.float16)]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.concatenate([*every, ties, *near, above, -above, any_bits]).astype("f4")
