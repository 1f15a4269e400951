"""Patterns of products that models are made of, at random sizes: the third kind of recipe.

Each is a function of x[b, m, c], y[b, n, c], two weights w[c, e] and u[e, c], a square s[c, c] and
a vector g[c].
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.products import DTYPES, LAYOUTS, MOST_SCORES, Recipe

Pattern: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def _heads(x: Tensor, count: int = 2) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax(_heads(q) @ _heads(k).mT * 0.25, -1)
    return (p @ _heads(v)).transpose(1, 2).flatten(2)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return x.pow(2).sum(-1)[:, :, None] + y.pow(2).sum(-1)[:, None] - 2 * x @ y.mT


def _contrastive(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, b = F.normalize(x.float(), dim=-1).to(x), F.normalize(y.float(), dim=-1).to(y)
    logits = (a @ b.mT).float() * 10
    return F.log_softmax(logits, -1).mean(), F.log_softmax(logits, -2).mean()


def _linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(1)[..., None] + 1e-3)


def _block(x: Tensor, w: Tensor, u: Tensor, s: Tensor, g: Tensor) -> Tensor:
    h = F.layer_norm(x, x.shape[-1:], g)
    q, k, v = h @ s, h @ s.t(), h * g
    x = x + _attended(q, k, v) @ s
    h = _normalised(x) * g
    return x + F.gelu(h @ w) @ u * w.shape[-1] ** -0.5


def _cached(x: Tensor, y: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    keys = torch.cat([y, x @ s], 1)
    q = torch.arange(x.shape[1])[:, None] + y.shape[1]
    scores = x @ keys.mT * 0.2
    scores = scores.masked_fill(torch.arange(keys.shape[1]) > q, float("-inf"))
    return torch.softmax(scores, -1) @ keys, keys


def _relative(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    place = torch.arange(x.shape[1])[:, None] - torch.arange(y.shape[1])
    bias = s.flatten()[place.clamp(-7, 7) + 7]
    return torch.softmax(x @ y.mT * 0.2 + bias, -1) @ y


def _packed(x: Tensor) -> Tensor:
    """Attend among positions of one document: a mask by data."""
    document = (x[..., 0].float() > 0).int()
    same = document[:, :, None] == document[:, None]
    scores = (x @ x.mT * 0.2).masked_fill(~same, float("-inf"))
    return torch.softmax(scores, -1) @ x


def _padded(x: Tensor, y: Tensor) -> Tensor:
    """Attend to keys up to a length that differs by batch, which may be 0."""
    lengths = (torch.arange(x.shape[0]) * y.shape[1]) // 2
    keep = torch.arange(y.shape[1]) < lengths[:, None, None]
    scores = (x @ y.mT * 0.2).masked_fill(~keep, float("-inf"))
    return torch.nan_to_num(torch.softmax(scores, -1)) @ y


def _mutated(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    h = x @ w
    x.mul_(0.5).add_(g)
    return h + (x @ w).tanh_()


PATTERNS: dict[str, Pattern] = {
    "distances": lambda x, y, w, u, s, g: _distances(x, y),
    "nearest": lambda x, y, w, u, s, g: _distances(x, y).amin(-1),
    "kernel regression": lambda x, y, w, u, s, g: torch.exp(-0.05 * _distances(x, y)) @ y,
    "kernel smoother": lambda x, y, w, u, s, g: torch.softmax(-0.1 * _distances(x, y), -1) @ y,
    "contrastive": lambda x, y, w, u, s, g: _contrastive(x, y),
    "linear attention": lambda x, y, w, u, s, g: _linear_attention(x, y, y * 0.5),
    "block": lambda x, y, w, u, s, g: _block(x, w, u, s, g),
    "cross": lambda x, y, w, u, s, g: x + _attended(x @ s, y @ s, y) * g,
    "cached": lambda x, y, w, u, s, g: _cached(x, y, s),
    "relative": lambda x, y, w, u, s, g: _relative(x, y, s),
    "packed": lambda x, y, w, u, s, g: _packed(x),
    "padded": lambda x, y, w, u, s, g: _padded(x, y),
    "mutated": lambda x, y, w, u, s, g: _mutated(x, w, g),
    "low rank": lambda x, y, w, u, s, g: x @ s + (x @ w[:, :4]) @ u[:4] * 0.5,
    "gate": lambda x, y, w, u, s, g: (F.silu(x @ w) * (x @ u.t())) @ u * w.shape[-1] ** -0.5,
    "glu": lambda x, y, w, u, s, g: F.glu(x @ torch.cat([w, u.t()], 1), -1),
    "normalised product": lambda x, y, w, u, s, g: _normalised(_normalised(x) @ s) * g,
    "normalised rows of scores": lambda x, y, w, u, s, g: F.normalize(x @ y.mT, dim=-1) @ y,
    "column softmax": lambda x, y, w, u, s, g: torch.softmax(x @ y.mT * 0.2, 1) @ y,
    "slots": lambda x, y, w, u, s, g: F.normalize(torch.softmax(x @ y.mT * 0.1, 1), 1.0, -1) @ y,
    "outer": lambda x, y, w, u, s, g: torch.einsum("bi,bj->bij", x[:, 0], y[:, 0]) * g,
    "all but one": lambda x, y, w, u, s, g: torch.einsum("bmc,bnc->b", x, y),
    "batch summed": lambda x, y, w, u, s, g: torch.einsum("bmc,bmd->cd", x, x.tanh()),
    "bilinear": lambda x, y, w, u, s, g: torch.einsum("bmc,cd,bnd->bmn", x, s, y) * 0.1,
    "batch inside": lambda x, y, w, u, s, g: torch.einsum("bmc,bnc->mbn", x, y) + 1,
    "moments": lambda x, y, w, u, s, g: torch.var_mean((x @ s).float(), (0, 1), correction=0),
    "whole moments": lambda x, y, w, u, s, g: (x @ s).float().square().mean((1, 2)),
    "huber": lambda x, y, w, u, s, g: F.smooth_l1_loss((x @ s).float(), x.float() * g),
    "squeezed": lambda x, y, w, u, s, g: x * torch.sigmoid(x.mean(1, keepdim=True) @ s),
    "decayed": lambda x, y, w, u, s, g: _decayed(x),
    "two masks": lambda x, y, w, u, s, g: _two_masks(x),
    "dot of rows": lambda x, y, w, u, s, g: ((x @ s) * x).sum(-1),
    "rows scaled": lambda x, y, w, u, s, g: (x @ s) * (x * g).sum(-1, keepdim=True),
    "scores and rows": lambda x, y, w, u, s, g: ((x @ y.mT).amax(-1), (x @ y.mT).float().sum(-2)),
    "entropy": lambda x, y, w, u, s, g: _entropy(x, y),
    "vector": lambda x, y, w, u, s, g: (x @ g, (x @ s) @ g),
    "every other": lambda x, y, w, u, s, g: F.relu(x[:, ::2] @ s[:, 1:]) + 1,
    "rows gathered": lambda x, y, w, u, s, g: s[_places(x, s)] @ w,
    "result gathered": lambda x, y, w, u, s, g: (x @ w)[:, _places(x, x[0])[0]],
    "rolled": lambda x, y, w, u, s, g: (x @ w).roll(3, 1) + (x @ w).flip(-1),
    "shuffled": lambda x, y, w, u, s, g: (x @ w).transpose(0, 1).reshape(-1, x.shape[0]) * 2,
    "tied": lambda x, y, w, u, s, g: F.gelu(x @ w) @ w.t(),
    "cubed": lambda x, y, w, u, s, g: s @ s @ s * 0.05,
    "gradient step": lambda x, y, w, u, s, g: s - 0.01 * (x[0].t() @ (x[0] @ s - x[0])),
}


def _places(x: Tensor, of: Tensor) -> Tensor:
    return (x[..., 0].float().abs() * 10).long() % of.shape[0]


def _decayed(x: Tensor) -> Tensor:
    """Retention: scores times a power of the distance, below the diagonal; no softmax."""
    i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
    decay = torch.where(i >= j, 0.9 ** (i - j).clamp_min(0).float(), 0.0).to(x)
    return (x @ x.mT * decay * 0.1) @ x


def _two_masks(x: Tensor) -> tuple[Tensor, Tensor]:
    i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
    scores = x @ x.mT * 0.2
    past = torch.softmax(scores.masked_fill(i < j, float("-inf")), -1)
    future = torch.softmax(scores.masked_fill(i > j, float("-inf")), -1)
    return past @ x, future @ x


def _entropy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    scores = (x @ y.mT).float() * 0.2
    logs = torch.log_softmax(scores, -1)
    return -(logs.exp() * logs).sum(-1), (logs.exp().to(y) @ y)


@dataclass(frozen=True)
class Composite(Recipe):
    """One pattern at some sizes: ``rows`` of x and ``others`` of y, ``width`` and ``inner``."""

    pattern: str = "tied"
    batch: int = 1
    rows: int = 16
    others: int = 16
    width: int = 16
    inner: int = 16
    special: bool = False

    @staticmethod
    def draw(seed: int) -> Composite:
        """Return a recipe by seed."""
        pick = random.Random(seed)
        pattern = list(PATTERNS)[seed % len(PATTERNS)]
        batch, rows = pick.choice((1, 1, 2, 3)), pick.choice((7, 16, 17, 33, 64, 65, 100))
        others, width = pick.choice((3, 16, 17, 33, 64, 129)), pick.choice((16, 24, 32, 48, 64))
        while batch * rows * max(rows, others) * width > MOST_SCORES // 2:
            batch, rows, others = 1, pick.choice((16, 17, 33, 50)), pick.choice((16, 17, 65))
        return Composite(
            dtype=pick.choice(DTYPES),
            layouts=tuple(pick.choice(LAYOUTS) for _ in range(pick.randrange(5))),
            train=pick.random() < 0.35 and pattern != "mutated",
            dynamic=pick.random() < 0.1,
            seed=seed,
            pattern=pattern,
            batch=batch,
            rows=rows,
            others=others,
            width=width,
            inner=pick.choice((16, 24, 40, 65, 130)),
            special=pick.random() < 0.1,
        )

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that ``run`` takes; special ones have an infinity and a NaN."""
        b, c, e = self.batch, self.width, self.inner
        shapes = (b, self.rows, c), (b, self.others, c), (c, e), (e, c), (c, c), (c,)
        given = [self.tensor(i, *shape) for i, shape in enumerate(shapes)]
        given[2:5] = [t * c**-0.5 for t in given[2:5]]
        if self.special:
            given[0][0, 1, 2], given[1][0, 2, 1] = float("inf"), float("nan")
        return tuple(given)

    def run(self, *inputs: Tensor) -> Any:
        """Compute the model."""
        x, y, w, u, s, g = inputs
        if self.pattern == "mutated":
            x = x.clone()
        return PATTERNS[self.pattern](x, y, w, u, s, g)
