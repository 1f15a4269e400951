"""Models around products on CPUs: GPT-2 whole, encoder blocks, a decoding step, small calls."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.workload import FROZEN, Case, Workload, modes
from bench.workloads.blocks import BertBlock, Gpt2Block, LlamaBlock, default_dtype, sized

GROUP = "products on CPUs"


class VitBlock(Gpt2Block):
    """Norm first, GELU by erf, all positions: ViT."""

    causal, gelu = False, "none"


class T5Block(nn.Module):
    """RMSNorm first, scores with a bias and without a scale, ReLU: T5's encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.bias = nn.Embedding(32, heads)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        split = (b, t, self.heads, c // self.heads)
        q, k, v = (f(x).view(split).transpose(1, 2) for f in (self.q, self.k, self.v))
        at = torch.arange(t, device=x.device)
        bias = self.bias((at[None] - at[:, None]).clamp(-16, 15) + 16).permute(2, 0, 1)
        weights = (q @ k.transpose(-2, -1) + bias).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


class Decoder(nn.Module):
    """Layers of Llama that see one token a sequence, and caches of `keys` earlier ones."""

    def __init__(self, layers: int, width: int, keys: int, batch: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width, keys, batch) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class DecoderLayer(nn.Module):
    def __init__(self, width: int, keys: int, batch: int) -> None:
        super().__init__()
        self.head, hidden = 64, width * 7 // 2
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(batch, width // self.head, keys, self.head))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.shape[-1] // self.head
        q, k, v = (
            part.view(-1, 1, heads, self.head).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        k, v = torch.cat((self.keys, k), 2), torch.cat((self.values, v), 2)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def gpt2(dtype: torch.dtype, device: str, shrink: int) -> Case:
    """GPT-2 124M of transformers with random weights, one sequence of 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel  # local: it takes a second

    config = GPT2Config(
        n_layer=max(1, 12 // shrink), n_embd=768 // shrink, n_head=12 // min(shrink, 4),
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(dtype)
    ids = torch.randint(0, config.vocab_size, (1, max(8, 128 // shrink)))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = self.model(ids).logits
            if not self.training:
                return logits
            return F.cross_entropy(logits[0, :-1], ids[0, 1:])

    return Case(Loss(), (ids,))


def decoding(dtype: torch.dtype, device: str, shrink: int, batch: int = 1) -> Case:
    """A token for each sequence through four layers of width 2048, 512 tokens behind it."""
    width = 2048 // shrink // 64 * 64 or 64
    with default_dtype(dtype):
        model = Decoder(4, width, max(16, 512 // shrink), batch)
    return Case(model, (torch.randn(batch, 1, width).to(dtype),))


def small_mlp(dtype: torch.dtype, device: str, shrink: int) -> Case:
    """Two layers of 64 for eight rows: what a call costs beside its work."""
    with default_dtype(dtype):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return Case(model, (torch.randn(8, 64).to(dtype),))


def flex(dtype: torch.dtype, device: str, shrink: int) -> Case:
    """``flex_attention``, causal by a block mask, with a bias of the key's position."""
    length = max(128, 2048 // shrink)
    mask = create_block_mask(lambda b, h, m, n: m >= n, None, None, length, length, device="cpu")
    bias = torch.randn(4, length).to(dtype)
    q, k, v = (torch.randn(1, 4, length, 64).to(dtype) for _ in range(3))

    def attend(q, k, v, bias):
        return flex_attention(q, k, v, lambda s, b, h, m, n: s + bias[h, n], mask)

    return Case(attend, (q, k, v, bias))


def cpu() -> list[Workload]:
    both = ("fp32", "bf16")
    return [
        *modes(GROUP, "gpt2 124M 1x128", gpt2, inference=FROZEN),
        *modes(GROUP, "bert block 1x512x768", sized(BertBlock, 1, 512, 768), both, FROZEN),
        *modes(GROUP, "llama block 1x256x1024", sized(LlamaBlock, 1, 256, 1024), both),
        *modes(GROUP, "vit block 8x197x384", sized(VitBlock, 8, 197, 384), both),
        *modes(GROUP, "t5 block 2x256x512", sized(T5Block, 2, 256, 512), both),
        *(
            Workload(GROUP, f"{name} 4x2048", partial(decoding, batch=batch), False, dtype, FROZEN)
            for name, batch in (("decoding step", 1), ("decoding step of four", 4))
            for dtype in both
        ),
        Workload(GROUP, "small mlp 8x64", small_mlp),
        Workload(GROUP, "flex attention causal+bias 1x4x2048x64", flex),
    ]


def gpu() -> list[Workload]:
    return []
