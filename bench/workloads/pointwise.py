"""Pointwise chains: the smallest case for fusion, three kernels and round trips in eager."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from bench.workload import Case, Workload, modes

GROUP = "memory-bound"


def relu_scale_shift(dtype: torch.dtype, device: str, shrink: int, *, n: int = 4096) -> Case:
    """relu(x) * 0.5 + 1.0, [n, n]."""
    x = torch.randn(n // shrink, n // shrink, device=device).to(dtype)
    return Case(lambda x: torch.relu(x) * 0.5 + 1.0, (x,))


def bias_gelu_residual(
    dtype: torch.dtype, device: str, shrink: int, *, rows: int = 8192, columns: int = 4096
) -> Case:
    """gelu(x + b) + r, [rows, columns]."""
    rows, columns = rows // shrink, columns // shrink
    x, r = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(2))
    b = torch.randn(columns, device=device).to(dtype)
    return Case(lambda x, b, r: F.gelu(x + b) + r, (x, b, r))


def swiglu(
    dtype: torch.dtype, device: str, shrink: int, *, rows: int = 8192, columns: int = 14336
) -> Case:
    """silu(a) * b, the activation of Llama's MLP."""
    shape = rows // shrink, columns // shrink
    a, b = (torch.randn(*shape, device=device).to(dtype) for _ in range(2))
    return Case(lambda a, b: F.silu(a) * b, (a, b))


def cpu() -> list[Workload]:
    return modes(GROUP, "relu(x)*0.5+1 4096x4096", relu_scale_shift)


def gpu() -> list[Workload]:
    wide = functools.partial(relu_scale_shift, n=8192)
    return [
        Workload(GROUP, "relu(x)*0.5+1 8192x8192", wide, dtype="bf16"),
        *modes(GROUP, "bias+gelu+residual 8192x4096", bias_gelu_residual, ("bf16",)),
        Workload(GROUP, "swiglu 8192x14336", swiglu, dtype="bf16"),
    ]
