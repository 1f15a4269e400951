"""Cross-entropy of language models, alone and behind the head: one long row a token."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from bench.workload import VARIANTS, Case, Workload, modes

GROUP = "memory-bound"


def cross_entropy(
    dtype: torch.dtype, device: str, shrink: int, *, tokens: int = 512, classes: int = 50257
) -> Case:
    """cross_entropy(logits, targets), [tokens, classes], in fp32 as losses are."""
    tokens, classes = tokens // shrink, classes // shrink
    logits = torch.randn(tokens, classes, device=device).to(dtype)
    targets = torch.randint(0, classes, (tokens,), device=device)

    def loss(logits, targets):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, targets)

    return Case(loss, (logits, targets))


def linear_cross_entropy(
    dtype: torch.dtype,
    device: str,
    shrink: int,
    *,
    tokens: int = 4096,
    width: int = 256,
    classes: int = 32000,
) -> Case:
    """cross_entropy(linear(x, w), targets): x [tokens, width], w [classes, width]."""
    tokens, classes = tokens // shrink, classes // shrink
    x = torch.randn(tokens, width, device=device).to(dtype)
    w = (torch.randn(classes, width, device=device) / width**0.5).to(dtype)
    targets = torch.randint(0, classes, (tokens,), device=device)

    def loss(x, w, targets):
        return F.cross_entropy(F.linear(x, w), targets)

    return Case(loss, (x, w, targets), flops=2 * tokens * width * classes)


def cpu() -> list[Workload]:
    return [
        *modes(GROUP, "cross-entropy 512x50257", cross_entropy),
        *modes("products", "linear + cross-entropy 4096x32000", linear_cross_entropy),
    ]


def gpu() -> list[Workload]:
    llama = functools.partial(cross_entropy, tokens=8192, classes=128256)
    gpt2 = functools.partial(cross_entropy, tokens=8192)

    def head(classes: int) -> Workload:
        build = functools.partial(linear_cross_entropy, tokens=8192, width=4096, classes=classes)
        name = f"linear+cross-entropy 8192x4096x{classes}"
        return Workload("linear + loss", name, build, True, "bf16", peers=VARIANTS, seconds=30)

    return [
        *modes(GROUP, "cross-entropy 8192x50257", gpt2, ("bf16",)),
        Workload(GROUP, "cross-entropy 8192x128256", llama, train=True, dtype="bf16"),
        head(32000),
        head(128256),
    ]
