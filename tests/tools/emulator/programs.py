"""Programs for each schedule of GPUs, at small ragged sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tools.emulator.recorded import normal

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class Program:
    """What is compiled, and what it is given.

    Attributes:
        shown: a pattern of one of its plans, printed behind the name of its schedule.
        draws: it draws random numbers, which eager draws others of.
    """

    fn: Callable[..., Any]
    inputs: list[Tensor]
    shown: str
    train: bool = False
    draws: bool = False


def row(n: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    """Return one of several unlike tensors."""
    return torch.roll(normal(*shape, dtype=dtype, scale=scale), n)


def codes(*shape: int) -> Tensor:
    """Return numbers of all that an int8 may be."""
    return (torch.arange(shape[0] * shape[1]) * 37 % 256 - 128).to(torch.int8).reshape(shape)


def of_integers(a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = torch._int_mm(a, w.t())
    return product, F.gelu((product * 1e-4).to(BF16))


def heads(*shape: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [row(n, *shape, dtype=dtype) for n in range(3)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def dropped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def of_gelu(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.linear(F.gelu(x), w) + y


def steps(*tensors: Tensor) -> list[Tensor]:
    """Update several tensors of different sizes: one launch over a table."""
    return [p * 0.9 + g.float() * 0.1 for p, g in zip(tensors[::2], tensors[1::2], strict=True)]


def extremes(x: Tensor) -> Any:
    return x.max(-1), x.argmin(-1), x.amax(0), x.float().prod(-1), x.isnan().any(-1)


def transcendental(x: Tensor) -> Any:
    y = x * 1e5  # beyond the short reduction of sin and cos
    return (
        y.sin() + y.cos(),
        x.tanh().erf(),
        x.exp().log1p(),
        x.abs().pow(2.5),
        x.sigmoid().atan2(x),
    )


def f64_trigonometry(x: Tensor) -> Any:
    return (x * 1e12).sin() + x.cos()


def integers(i: Tensor) -> Any:
    return i // 7, i % 5, i << 2, i >> 1, i & 3, i.float().round().to(torch.int8)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def normed_and_rotated(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(F.rms_norm(x, x.shape[-1:], w), cos.detach(), sin.detach())


def rotated_in_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours, each pair by an angle."""
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = cos.detach(), sin.detach()
    pairs = first * cos - second * sin, first * sin + second * cos
    return torch.stack(pairs, -1).flatten(-2)


def rotated_as_complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * torch.complex(cos.float(), sin.float()).detach()
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def normed_and_rotated_in_pairs(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated_in_pairs(F.rms_norm(x, x.shape[-1:], w), cos, sin)


MEMORY = {
    "gelu and bias": Program(lambda x, b: F.gelu(x + b), [row(0, 11, 300), row(1, 300)],
        "pointwise", train=True),
    "swiglu without products": Program(lambda x, g: F.silu(g) * x, [row(0, 7, 99), row(1, 7, 99)],
        "pointwise", train=True),
    "a transpose": Program(lambda x, y: x + y.T, [row(0, 70, 130), row(1, 130, 70)],
        r"pointwise.*grid\*64.*grid\*64"),
    "transcendental functions": Program(transcendental, [row(0, 8, 100, dtype=F32)], "pointwise"),
    "trigonometry of f64": Program(f64_trigonometry, [row(0, 8, 100, dtype=F32).double()],
        "pointwise"),
    "codes of 8 bits": Program(lambda i, s: i.to(BF16) * s,
        [(torch.arange(512) % 256 - 128).to(torch.int8), row(0, 512)], "pointwise"),
    "integers": Program(integers, [torch.arange(-300, 300)], "pointwise"),
    "embedding": Program(lambda t, i: F.gelu(F.embedding(i, t)), [row(0, 40, 64), torch.arange(30)],
        "pointwise", train=True),
    "pooling": Program(lambda x: F.max_pool2d(x, 2), [row(0, 1, 3, 18, 18)], "rowwise", train=True),
    "dropout": Program(lambda x: F.dropout(F.silu(x), 0.25), [row(0, 11, 300)], "pointwise",
        train=True, draws=True),
    "layer norm": Program(layer_norm, [row(0, 13, 100), row(1, 100), row(2, 100)],
        r"rowwise.*lanes\(128\)", train=True),
    "a long layer norm": Program(layer_norm, [row(0, 3, 9000), row(1, 9000), row(2, 9000)],
        r"rowwise.*lanes\(16384\)", train=True),
    "rms norm": Program(lambda x, w: F.rms_norm(x, (768,), w), [row(0, 7, 768), row(1, 768)],
        "rowwise", train=True),
    "a layer norm of parts": Program(layer_norm, [row(0, 7, 3072), row(1, 3072), row(2, 3072)],
        r"rowwise.*lanes\(1024\)", train=True),
    "a layer norm of short parts": Program(layer_norm, [row(0, 70, 768), row(1, 768), row(2, 768)],
        r"rowwise.*lanes\(256\)", train=True),
    "rotary embedding": Program(lambda x, c, s: rotated(x, c.detach(), s.detach()),
        [row(0, 2, 3, 10, 64), row(1, 10, 64), row(2, 10, 64)], r"pointwise.*grid\*32", train=True),
    "rotary embedding with gradients of angles": Program(rotated,
        [row(0, 6, 10, 64), row(1, 10, 64), row(2, 10, 64)], "columnwise", train=True),
    "rms norm and rotary embedding": Program(normed_and_rotated,
        [row(0, 2, 3, 10, 64), row(1, 64), row(2, 10, 64), row(3, 10, 64)],
        r"rowwise.*lanes\(32\)", train=True),
    "rotary embedding in pairs": Program(rotated_in_pairs,
        [row(0, 2, 3, 10, 64), row(1, 10, 32), row(2, 10, 32)], r"pointwise.*grid\*32", train=True),
    "rotary embedding of complex numbers": Program(rotated_as_complex,
        [row(0, 2, 3, 10, 64), row(1, 10, 32), row(2, 10, 32)], r"pointwise.*grid\*32", train=True),
    "rms norm and rotary embedding in pairs": Program(normed_and_rotated_in_pairs,
        [row(0, 2, 3, 10, 64), row(1, 64), row(2, 10, 32), row(3, 10, 32)],
        r"rowwise.*lanes\(32\)", train=True),
    "upsampling": Program(lambda x: F.interpolate(x, scale_factor=2.0), [row(0, 1, 2, 10, 24)],
        "pointwise", train=True),
    "softmax": Program(lambda x: x.softmax(-1), [row(0, 5, 1000)], "rowwise", train=True),
    "cross-entropy": Program(F.cross_entropy, [row(0, 9, 5257), torch.arange(9) * 500],
        "rowwise", train=True),
    "cross-entropy of long rows": Program(F.cross_entropy, [row(0, 3, 33001), torch.arange(3) * 9],
        r"rowwise.*loop\*16384 in 4", train=True),
    "softmax of long rows": Program(lambda x: x.softmax(-1), [row(0, 2, 33008)],
        r"rowwise.*loop\*32768 in 8", train=True),
    "group norm": Program(lambda x, w, b: F.group_norm(x, 4, w, b),
        [row(0, 2, 16, 77), row(1, 16), row(2, 16)], "rowwise", train=True),
    "batch norm": Program(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [row(0, 3, 16, 150), row(1, 16), row(2, 16)], "rowwise", train=True),
    "batch norm that loads ahead": Program(
        lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True)),
        [row(0, 64, 2, 1000), row(1, 2), row(2, 2)], r"rowwise.*loop\*8.*stages=2", train=True),
    "batch norm of odd images": Program(
        lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, training=True)),
        [row(0, 90, 4, 13, 13), row(1, 4), row(2, 4)], r"rowwise.*loop\*16.*warps=8", train=True),
    "sums of sums of odd images": Program(
        lambda x, y: x * (x.float() * y).sum((2, 3)).sum(0)[:, None, None],
        [row(0, 90, 4, 13, 13), row(1, 90, 4, 13, 13)], r"rowwise.*loop\*16.*warps=8"),
    "extremes": Program(extremes, [row(0, 9, 700)], "rowwise"),
    "a scan": Program(lambda x: x.float().cumsum(-1), [row(0, 9, 200)], "pointwise"),
    "a histogram": Program(lambda x: torch.histc(x, 20, -2, 2), [row(0, 700, dtype=F32)],
        r"rowwise.*lanes\(1024\)"),
    "a sum of columns": Program(lambda x: x.float().sum(0), [row(0, 70, 40)], "columnwise"),
    "a split sum of columns": Program(lambda x: x.float().sum(0), [row(0, 3000, 40)],
        r"columnwise.*\n.*columnwise"),
    "a foreach kernel": Program(steps, [row(n, *shape, dtype=dtype) for n, shape in
        enumerate([(100, 30), (77,), (8, 8, 8)]) for dtype in (F32, BF16)], "pointwise"),
}  # fmt: skip
"""Kernels without products, whose schedules offer one plan each."""


def ends(*sizes: int) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return F.silu(torch._grouped_mm(x, w, offs=offs))


def gated_experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    gate, up = torch._grouped_mm(x, w, offs=offs).chunk(2, -1)
    return F.silu(gate) * up


SIZES = 9, 0, 140, 1, 50

PRODUCTS = {
    "grouped product": Program(experts, [row(0, 200, 136), row(1, 5, 136, 72, scale=0.1),
        ends(*SIZES)], r"contraction.*e=loop", train=True),
    "gated grouped product": Program(gated_experts, [row(0, 200, 136),
        row(1, 5, 136, 144, scale=0.1), ends(*SIZES)], r"contraction.*e=loop"),
    "linear and GELU": Program(linear,
        [row(0, 200, 264), row(1, 328, 264, scale=0.06), row(2, 328)], "contraction", train=True),
    "linear of odd sizes": Program(linear,
        [row(0, 129, 65), row(1, 257, 65, scale=0.1), row(2, 257)], "contraction", train=True),
    "linear in f32": Program(linear, [row(0, 100, 72, dtype=F32), row(1, 136, 72, dtype=F32),
        row(2, 136, dtype=F32)], "contraction", train=True),
    "linear in f16": Program(linear, [row(0, 100, 72, dtype=F16),
        row(1, 136, 72, scale=0.1, dtype=F16), row(2, 136, dtype=F16)], "contraction", train=True),
    "linear in int8": Program(of_integers, [codes(144, 200), codes(72, 200)], "contraction"),
    "linear of few rows": Program(linear, [row(0, 16, 512), row(1, 136, 512, scale=0.05),
        row(2, 136)], "contraction.*stages=6"),
    "linear of a GELU": Program(of_gelu, [row(0, 136, 512), row(1, 264, 512, scale=0.05),
        row(2, 136, 264)], "contraction.*descriptors"),
    "GEMV": Program(lambda x, w: F.silu(F.linear(x, w)),
        [row(0, 1, 2048), row(1, 40, 2048, scale=0.03)], "rowwise"),
    "swiglu": Program(lambda x, w, v: F.silu(x @ w) * (x @ v),
        [row(0, 136, 200), *(row(n, 200, 136, scale=0.07) for n in (1, 2))], "contraction",
        train=True),
    "causal attention": Program(attention, heads(1, 3, 200, 64), "contraction", train=True),
    "causal attention of wide heads": Program(attention, heads(1, 2, 150, 128),
        "contraction", train=True),
    "causal attention in f32": Program(attention, heads(1, 2, 100, 64, dtype=F32), "contraction",
        train=True),
    "attention with a bias": Program(biased_attention,
        [*heads(1, 2, 100, 64), row(0, 1, 1, 100, 100)], "contraction", train=True),
    "attention with dropout": Program(dropped_attention, heads(1, 2, 100, 64), "contraction",
        train=True, draws=True),
    "decoding": Program(decode,
        [row(0, 2, 32, 1, 128), row(1, 2, 8, 512, 128), row(2, 2, 8, 512, 128)],
        r"contraction.*\n.*"),
}  # fmt: skip
"""Kernels with products: a race may choose among many plans."""
