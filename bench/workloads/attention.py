"""Attention: as the library's call, with biases that the library computes slowly, written out.

A floor counts half of the operations where a causal mask hides half of the scores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.workload import VARIANTS, Case, Workload, shrunk

GROUP = "attention"
LIBRARY = ("eager", "cudnn", *VARIANTS[1:])
"""Peers where the call is the library's: its default, and cuDNN's."""


def heads(
    dtype: torch.dtype, device: str, shrink: int, batch: int, count: int, length: int, width: int
) -> tuple[torch.Tensor, ...]:
    """q, k, v [batch, heads, length, width]."""
    shape = (max(1, batch // shrink), max(1, count // shrink), shrunk(length, shrink), width)
    return tuple(torch.randn(*shape, device=device).to(dtype) for _ in range(3))


def flops(q: torch.Tensor, *, causal: bool) -> int:
    whole = 4 * math.prod(q.shape) * q.shape[-2]
    return whole // 2 if causal else whole


Sizes = tuple[int, int, int, int]


def plain(dtype: torch.dtype, device: str, shrink: int, *, sizes: Sizes) -> Case:
    """The library's causal attention."""
    q, k, v = heads(dtype, device, shrink, *sizes)
    return Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (q, k, v),
        flops=flops(q, causal=True),
        backward=2.5,
    )


def written_out(
    dtype: torch.dtype, device: str, shrink: int, *, sizes: Sizes, in_memory: bool = True
) -> Case:
    """softmax(mask(q @ k.T / sqrt(d))) @ v, causal, as model code writes it.

    Args:
        in_memory: the mask is a tensor that was made before; else it compares positions.
    """
    q, k, v = heads(dtype, device, shrink, *sizes)
    length, scale = q.shape[-2], q.shape[-1] ** -0.5
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()

    def attend(q, k, v):
        scores = (q @ k.transpose(-2, -1)) * scale
        place = torch.arange(length, device=q.device)
        seen = mask if in_memory else place[:, None] >= place
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v

    return Case(attend, (q, k, v), flops=flops(q, causal=True), backward=2.5)


def biased(dtype: torch.dtype, device: str, shrink: int, *, sizes: Sizes) -> Case:
    """The library's call with an additive bias [1, heads, length, length] (T5, Swin, Evoformer)."""
    q, k, v = heads(dtype, device, shrink, *sizes)
    bias = torch.randn(1, q.shape[1], q.shape[2], q.shape[2], device=device).to(dtype)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))

    return Case(attend, (q, k, v), flops=flops(q, causal=False), backward=2.5)


def alibi(dtype: torch.dtype, device: str, shrink: int, *, sizes: Sizes) -> Case:
    """Causal, with a bias that is linear in the distance: written out, the bias made on the way."""
    q, k, v = heads(dtype, device, shrink, *sizes)
    count, length, scale = q.shape[1], q.shape[2], q.shape[3] ** -0.5
    slopes = 2.0 ** (-8.0 * torch.arange(1, count + 1, device=device) / count)

    def attend(q, k, v):
        place = torch.arange(length, device=q.device)
        distance = place[None, :] - place[:, None]
        scores = (q @ k.transpose(-2, -1)) * scale
        scores = scores + (slopes[:, None, None] * distance).to(q.dtype)
        scores = scores.masked_fill(distance > 0, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v

    return Case(attend, (q, k, v), flops=flops(q, causal=True), backward=2.5)


def unmasked(
    dtype: torch.dtype, device: str, shrink: int, *, sizes: Sizes, biased: bool, cap: float = 0.0
) -> Case:
    """softmax(score(q @ k.T / sqrt(d))) @ v written out, with a bias or a soft cap on scores."""
    q, k, v = heads(dtype, device, shrink, *sizes)
    scale = q.shape[-1] ** -0.5
    bias = torch.randn(q.shape[1], q.shape[2], q.shape[2], device=device).to(dtype)

    def attend(q, k, v):
        scores = (q @ k.transpose(-2, -1)) * scale
        scores = scores + bias if biased else scores
        scores = cap * torch.tanh(scores / cap) if cap else scores
        return scores.softmax(-1) @ v

    return Case(attend, (q, k, v), flops=flops(q, causal=False), backward=2.5)


def cpu() -> list[Workload]:
    """Written out, and the library's call."""
    usual, wide = (4, 8, 1024, 64), (2, 8, 1024, 128)
    plainly = functools.partial(unmasked, biased=False)
    with_bias = functools.partial(unmasked, biased=True)
    capped = functools.partial(unmasked, biased=False, cap=30.0)
    causal = functools.partial(written_out, in_memory=False)
    in_bf16 = [("written out", plainly, usual), ("written out, causal", causal, usual)]
    rows = [
        *in_bf16,
        ("written out, causal by a mask in memory", written_out, usual),
        ("written out, ALiBi", alibi, usual),
        ("written out, bias", with_bias, usual),
        ("written out, soft cap", capped, usual),
        ("causal", plain, usual),
        ("causal", plain, wide),
    ]
    return [
        Workload(
            GROUP,
            f"{name} {'x'.join(map(str, sizes))}",
            functools.partial(build, sizes=sizes),
            train,
            dtype,
        )
        for dtype, given in (("fp32", rows), ("bf16", [*in_bf16, ("causal", plain, usual)]))
        for name, build, sizes in given
        for train in (False, True)
    ]


def gpu() -> list[Workload]:
    gpt2, wide, llama = (8, 25, 1024, 64), (8, 16, 1024, 64), (2, 32, 4096, 128)

    def row(
        name: str, build: Callable, sizes: Sizes, peers: tuple[str, ...], train: bool = False
    ) -> Workload:
        named = f"{name} {'x'.join(map(str, sizes))}"
        made = functools.partial(build, sizes=sizes)
        return Workload(GROUP, named, made, train, "bf16", peers=peers, seconds=20)

    return [
        row("causal", plain, gpt2, LIBRARY),
        row("additive bias", biased, wide, VARIANTS),
        row("written out", written_out, wide, VARIANTS),
        row("alibi", alibi, wide, VARIANTS),
        row("causal", plain, llama, LIBRARY),
        row("written out", written_out, wide, VARIANTS, True),
        row("additive bias", biased, wide, VARIANTS, True),
        row("causal", plain, gpt2, LIBRARY, True),
    ]
