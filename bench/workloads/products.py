"""Matrix products with what follows them: activations, residuals, the gate of SwiGLU.

Sizes are those of BERT-large, GPT-2 XL, ViT-L/16 and Llama-3-8B. `bare` is the product alone, as
the library computes it: what an epilogue costs is the difference.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from bench.workload import TUNED, VARIANTS, Case, Workload, shrunk

GROUP = "products"


def _operands(
    dtype: torch.dtype, device: str, rows: int, k: int, n: int, count: int = 1
) -> list[torch.Tensor]:
    """x[rows, k] and `count` weights [n, k], scaled so that results are about one."""
    x = torch.randn(rows, k, device=device).to(dtype)
    scale = k**-0.5
    return [x, *((torch.randn(n, k, device=device) * scale).to(dtype) for _ in range(count))]


def linear_gelu(
    dtype: torch.dtype, device: str, shrink: int, *, rows: int, k: int, n: int, tanh: bool = False
) -> Case:
    """gelu(x @ w.T + b), exact or by tanh."""
    rows, k, n = shrunk(rows, shrink), shrunk(k, shrink), shrunk(n, shrink)
    x, w = _operands(dtype, device, rows, k, n)
    b = torch.randn(n, device=device).to(dtype)
    how = "tanh" if tanh else "none"
    return Case(
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate=how),
        (x, w, b),
        flops=2 * rows * k * n,
        bare=lambda x, w, b: F.linear(x, w),
    )


def linear_residual(
    dtype: torch.dtype, device: str, shrink: int, *, rows: int, k: int, n: int, bias: bool = True
) -> Case:
    """r + (x @ w.T + b), with or without b."""
    rows, k, n = shrunk(rows, shrink), shrunk(k, shrink), shrunk(n, shrink)
    x, w = _operands(dtype, device, rows, k, n)
    r = torch.randn(rows, n, device=device).to(dtype)
    b = (torch.randn(n, device=device).to(dtype),) if bias else ()
    return Case(
        lambda x, w, r, *b: r + F.linear(x, w, *b),
        (x, w, r, *b),
        flops=2 * rows * k * n,
        bare=lambda x, w, r, *b: F.linear(x, w),
    )


def swiglu(dtype: torch.dtype, device: str, shrink: int, *, rows: int, k: int, n: int) -> Case:
    """silu(x @ g.T) * (x @ u.T): two products of one input."""
    rows, k, n = shrunk(rows, shrink), shrunk(k, shrink), shrunk(n, shrink)
    x, g, u = _operands(dtype, device, rows, k, n, 2)
    return Case(
        lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
        (x, g, u),
        flops=4 * rows * k * n,
        bare=lambda x, g, u: (F.linear(x, g), F.linear(x, u)),
    )


def mlp(dtype: torch.dtype, device: str, shrink: int, *, rows: int, k: int, n: int) -> Case:
    """gelu(x @ a.T) @ b.T."""
    rows, k, n = shrunk(rows, shrink), shrunk(k, shrink), shrunk(n, shrink)
    x, a = _operands(dtype, device, rows, k, n)
    _, b = _operands(dtype, device, 1, n, k)
    return Case(
        lambda x, a, b: F.linear(F.gelu(F.linear(x, a)), b), (x, a, b), flops=4 * rows * k * n
    )


def gated_mlp(dtype: torch.dtype, device: str, shrink: int, *, rows: int, k: int, n: int) -> Case:
    """(silu(x @ g.T) * (x @ u.T)) @ d.T."""
    rows, k, n = shrunk(rows, shrink), shrunk(k, shrink), shrunk(n, shrink)
    x, g, u = _operands(dtype, device, rows, k, n, 2)
    _, d = _operands(dtype, device, 1, n, k)
    return Case(
        lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d),
        (x, g, u, d),
        flops=6 * rows * k * n,
    )


def cpu() -> list[Workload]:
    return []


def gpu() -> list[Workload]:
    bert_up = functools.partial(linear_gelu, rows=16384, k=1024, n=4096)
    bert_down = functools.partial(linear_residual, rows=16384, k=4096, n=1024)
    gpt2_up = functools.partial(linear_gelu, rows=8192, k=1600, n=6400, tanh=True)
    gpt2_down = functools.partial(linear_residual, rows=8192, k=6400, n=1600)
    vit_up = functools.partial(linear_gelu, rows=64 * 197, k=1024, n=4096)
    llama_gate = functools.partial(swiglu, rows=8192, k=4096, n=14336)
    llama_down = functools.partial(linear_residual, rows=8192, k=14336, n=4096, bias=False)
    builds = {
        "linear+gelu bert-large": bert_up,
        "linear+bias+residual bert-large": bert_down,
        "linear+gelu gpt2-xl": gpt2_up,
        "linear+bias+residual gpt2-xl": gpt2_down,
        "linear+gelu vit-l": vit_up,
        "swiglu llama-8b": llama_gate,
        "linear+residual llama-8b": llama_down,
    }
    rows = [
        Workload(GROUP, name, build, dtype="bf16", peers=VARIANTS, seconds=25)
        for name, build in builds.items()
    ]
    bert = functools.partial(mlp, rows=16384, k=1024, n=4096)
    llama = functools.partial(gated_mlp, rows=4096, k=4096, n=14336)
    rows += [
        Workload("blocks", name, build, train=True, dtype="bf16", peers=VARIANTS, seconds=30)
        for name, build in (("mlp bert-large", bert), ("mlp llama-8b", llama))
    ]
    # A second time beside a peer that tunes for long, when all others have been measured.
    slow = ("linear+gelu bert-large", "swiglu llama-8b", "linear+bias+residual gpt2-xl")
    tuned = [
        Workload("products, tuned", name, builds[name], dtype="bf16", peers=TUNED, seconds=50)
        for name in slow
    ]
    return [*rows, *tuned]
