"""Transformer blocks: contractions and attention with the chains between them."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from bench.workload import Case, Workload, modes

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

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


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
    """A block on [batch, length, width] with heads of width 64."""
    batch, length = max(1, batch // shrink), max(8, length // shrink)
    width = max(64, width // shrink // 64 * 64)
    heads = () if module is MlpBlock else (width // 64,)
    x = torch.randn(batch, length, width, device=device).to(dtype)
    return Case(module(width, *heads).to(device=device, dtype=dtype), (x,))


def sized(module: type[nn.Module], batch: int, length: int, width: int):
    return functools.partial(block, module=module, batch=batch, length=length, width=width)


def cpu() -> list[Workload]:
    return [
        *modes(GROUP, "gpt2 block 2x256x768", sized(Gpt2Block, 2, 256, 768)),
        *modes(GROUP, "bert block 4x128x768", sized(BertBlock, 4, 128, 768)),
        *modes(GROUP, "mlp block 4x128x768", sized(MlpBlock, 4, 128, 768)),
    ]


def gpu() -> list[Workload]:
    return [
        Workload(GROUP, "gpt2-xl block 8x1024x1600", sized(Gpt2Block, 8, 1024, 1600), True, "bf16"),
        Workload(GROUP, "bert-large block 32x512x1024", sized(BertBlock, 32, 512, 1024), True,
                 "bf16"),
    ]  # fmt: skip
