"""Transformer blocks: contractions and attention with the chains between them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from bench.workload import VARIANTS, Case, Workload, modes

GROUP = "blocks"


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            p.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for p in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Gpt2Block(nn.Module):
    """Norm first, GELU by tanh, causal: GPT-2."""

    causal, gelu = True, "tanh"

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=self.causal)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.gelu))


class BertBlock(nn.Module):
    """Norm last, GELU by erf, all positions: BERT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class MlpBlock(nn.Module):
    """x + down(gelu(up(layer_norm(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary embedding, heads that share keys, SwiGLU: Llama 3."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.shared, self.head = heads, max(1, heads // 4), width // heads
        hidden = width * 7 // 2
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (
            nn.Linear(width, self.shared * self.head, bias=False) for _ in range(2)
        )  # fmt: skip
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        rates = 500000.0 ** -torch.linspace(0, 1, self.head // 2, dtype=torch.float32)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), rates).repeat(1, 2)
        kind = torch.get_default_dtype()
        self.register_buffer("cos", angles.cos().to(kind), persistent=False)
        self.register_buffer("sin", angles.sin().to(kind), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q = self.rotated(self.q(x).view(b, t, self.heads, self.head).transpose(1, 2))
        k = self.rotated(self.k(x).view(b, t, self.shared, self.head).transpose(1, 2))
        v = self.v(x).view(b, t, self.shared, self.head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))

    def rotated(self, q: torch.Tensor) -> torch.Tensor:
        low, high = q.chunk(2, -1)
        return q * self.cos + torch.cat((-high, low), -1) * self.sin


class Gpt(nn.Module):
    """A whole small GPT with its loss: what `bench.compile_time` compiles."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Gpt2Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(ids.shape[1], device=ids.device)
        h = self.tokens(ids) + self.positions(steps)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def block(
    dtype: torch.dtype, device: str, shrink: int, *, module, batch: int, length: int, width: int
) -> Case:
    """A block on [batch, length, width] with heads of width 64, Llama's of 128.

    The operations of attention's products are left out: the floor is low.
    """
    batch, length = max(1, batch // shrink), max(8, length // shrink)
    width = max(64, width // shrink // 64 * 64)
    x = torch.randn(batch, length, width, device=device).to(dtype)
    with torch.device(device), default_dtype(dtype):
        made = module(*sizes_of(module, width, length))
    weights = sum(p.numel() for p in made.parameters() if p.dim() == 2)
    return Case(made, (x,), flops=2 * batch * length * weights)


def sizes_of(module: type[nn.Module], width: int, length: int) -> tuple[int, ...]:
    """Return the arguments of a block's class."""
    if module is LlamaBlock:
        return width, max(4, width // 128), length
    return (width,) if module is MlpBlock else (width, width // 64)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make modules in a type. Converting them afterwards is what fake tensors cannot do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def sized(module: type[nn.Module], batch: int, length: int, width: int):
    return functools.partial(block, module=module, batch=batch, length=length, width=width)


def cpu() -> list[Workload]:
    return [
        *modes(GROUP, "gpt2 block 2x256x768", sized(Gpt2Block, 2, 256, 768)),
        *modes(GROUP, "bert block 4x128x768", sized(BertBlock, 4, 128, 768)),
        *modes(GROUP, "mlp block 4x128x768", sized(MlpBlock, 4, 128, 768)),
    ]


def gpu() -> list[Workload]:
    def row(name: str, build: functools.partial) -> Workload:
        return Workload(GROUP, name, build, True, "bf16", peers=VARIANTS, seconds=40)

    return [
        row("gpt2-xl block 8x1024x1600", sized(Gpt2Block, 8, 1024, 1600)),
        row("llama-8b block 2x2048x4096", sized(LlamaBlock, 2, 2048, 4096)),
        row("bert-large block 32x512x1024", sized(BertBlock, 32, 512, 1024)),
    ]
