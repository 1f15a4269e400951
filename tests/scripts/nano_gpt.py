"""A small GPT that learns the letters of a text, as nanoGPT trains: AdamW, warmup, clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    """Sizes of the model."""

    length: int = 64
    letters: int = 65
    layers: int = 3
    heads: int = 4
    width: int = 64


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=False)
        self.c_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.c_attn(x).split(c, dim=2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.letters, config.width)
        self.wpe = nn.Embedding(config.length, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.letters, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(step: int, steps: int) -> float:
    """Return the learning rate: it rises for two steps, and falls along a cosine."""
    return 1e-3 * min((step + 1) / 2, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.1)


def main(steps: int = 12) -> None:
    torch.manual_seed(0)
    config = Config()
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    compiled = torch.compile(model)
    text = torch.randint(config.letters, (4096,))
    for step in range(steps):
        starts = torch.randint(len(text) - config.length - 1, (8,))
        tokens = torch.stack([text[s : s + config.length] for s in starts])
        targets = torch.stack([text[s + 1 : s + 1 + config.length] for s in starts])
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        _, loss = compiled(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 4 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        tokens = text[None, : config.length]
        for _ in range(4):
            logits, _ = compiled(tokens)
            following = torch.multinomial(logits[:, -1].softmax(-1), 1)
            tokens = torch.cat([tokens[:, 1:], following], dim=1)


if __name__ == "__main__":
    main()
