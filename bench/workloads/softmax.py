"""Masked softmax, the memory-bound part of attention that is written out."""

from __future__ import annotations

import functools

import torch

from bench.workload import Case, Workload, modes

GROUP = "memory-bound"


def masked_softmax(
    dtype: torch.dtype,
    device: str,
    shrink: int,
    *,
    batch: int = 8,
    heads: int = 12,
    length: int = 256,
) -> Case:
    """softmax(scores / 8 masked by a causal mask), [batch, heads, length, length]."""
    batch, length = max(1, batch // shrink), length // shrink
    scores = torch.randn(batch, heads, length, length, device=device).to(dtype)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    lowest = torch.finfo(dtype).min

    def chain(scores, mask):
        return (scores * 0.125).masked_fill(mask, lowest).softmax(-1)

    return Case(chain, (scores, mask))


def cpu() -> list[Workload]:
    return modes(GROUP, "masked softmax 8x12x256x256", masked_softmax, ("fp32", "bf16"))


def gpu() -> list[Workload]:
    long = functools.partial(masked_softmax, heads=16, length=1024)
    return modes(GROUP, "masked softmax 8x16x1024x1024", long, ("bf16",))
