"""Normalisations with what surrounds them in transformers: residuals, GELU, rotary embedding."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from bench.workload import Case, Workload, modes

GROUP = "memory-bound"


def residual_layernorm_gelu(
    dtype: torch.dtype, device: str, shrink: int, *, rows: int = 4096, columns: int = 1024
) -> Case:
    """h = x + r; gelu(layer_norm(h)), h."""
    rows, columns = rows // shrink, columns // shrink
    x, r = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(2))
    w, b = (torch.randn(columns, device=device).to(dtype) for _ in range(2))

    def chain(x, r, w, b):
        h = x + r
        return F.gelu(F.layer_norm(h, (h.shape[-1],), w, b)), h

    return Case(chain, (x, r, w, b))


def residual_layernorm(
    dtype: torch.dtype, device: str, shrink: int, *, rows: int = 16384, columns: int = 1024
) -> Case:
    """h = x + r; layer_norm(h), h."""
    rows, columns = rows // shrink, columns // shrink
    x, r = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(2))
    w, b = (torch.randn(columns, device=device).to(dtype) for _ in range(2))

    def chain(x, r, w, b):
        h = x + r
        return F.layer_norm(h, (h.shape[-1],), w, b), h

    return Case(chain, (x, r, w, b))


def residual_rmsnorm(
    dtype: torch.dtype, device: str, shrink: int, *, rows: int = 8192, columns: int = 4096
) -> Case:
    """h = x + r; rms_norm(h), h, as Llama's decoder layers write it."""
    rows, columns = rows // shrink, columns // shrink
    x, r = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(2))
    w = torch.randn(columns, device=device).to(dtype)

    def chain(x, r, w):
        h = x + r
        wide = h.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * wide.to(h.dtype), h

    return Case(chain, (x, r, w))


def rmsnorm_rope(
    dtype: torch.dtype,
    device: str,
    shrink: int,
    *,
    batch: int = 4,
    length: int = 1024,
    heads: int = 16,
    width: int = 64,
) -> Case:
    """Rotary embedding of an RMS-normalised query, [batch, length, heads, width]."""
    batch, length = max(1, batch // shrink), length // shrink
    x = torch.randn(batch, length, heads, width, device=device).to(dtype)
    w = torch.randn(width, device=device).to(dtype)
    angles = torch.outer(torch.arange(length), 10000.0 ** -torch.linspace(0, 1, width // 2))
    angles = torch.cat((angles, angles), -1).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def chain(x, w):
        q = F.rms_norm(x, (x.shape[-1],), w, 1e-6)
        q = q.transpose(1, 2)
        half = q.shape[-1] // 2
        turned = torch.cat((-q[..., half:], q[..., :half]), -1)
        return q * cos.to(q.dtype) + turned * sin.to(q.dtype)

    return Case(chain, (x, w))


def cpu() -> list[Workload]:
    return [
        *modes(GROUP, "residual+layernorm+gelu 4096x1024", residual_layernorm_gelu,
               ("fp32", "bf16")),
        *modes(GROUP, "rmsnorm+rope 4x1024x16x64", rmsnorm_rope),
    ]  # fmt: skip


def gpu() -> list[Workload]:
    rope = functools.partial(rmsnorm_rope, batch=8, heads=32, width=128)
    wide = functools.partial(residual_layernorm, rows=4096, columns=16384)
    odd = functools.partial(residual_layernorm, rows=8192, columns=1600)
    return [
        *modes(GROUP, "residual+layernorm 16384x1024", residual_layernorm, ("bf16",)),
        *modes(GROUP, "residual+rmsnorm 8192x4096", residual_rmsnorm, ("bf16",)),
        Workload(GROUP, "residual+layernorm 8192x1600", odd, dtype="bf16"),
        Workload(GROUP, "residual+layernorm 4096x16384", wide, dtype="bf16"),
        Workload(GROUP, "rmsnorm+rope 8x1024x32x128", rope, dtype="bf16"),
    ]
