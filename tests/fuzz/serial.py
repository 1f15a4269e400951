"""Random scatters and scans, between other steps: recipes as those of ``products.py``.

Worked example: ``Serial(form="index_add", dim=1, result="softmax")`` adds 333 sources to the
columns of a matrix of 64 by 17, and computes a softmax of its rows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.products import LAYOUTS, STEPS, Recipe, Results
from tests.support import values

EXTENTS = (1, 3, 17, 40, 64, 130)
SOURCES = (50, 333, 2000)
ELEMENTS = 900
"""Fewer, and the direct form would compare all pairs."""
PLAIN = ("none", "half", "square", "tanh", "erf", "silu")
RESULTS: dict[str, Results] = {
    "whole": lambda y: y,
    "transposed": lambda y: y.transpose(0, -1) * 2,
    "reversed": lambda y: y.flip(0),
    "softmax": lambda y: y.softmax(-1),
    "row sums": lambda y: y.sum(-1),
    "column sums": lambda y: (y, y.sum(0)),
    "largest": lambda y: (y, y.amax(-1)),
}
FORMS = (
    "cumsum", "cumprod", "cummax", "index_add", "scatter_add", "index_put", "amax", "mean",
    "select", "embedding", "twice",
)  # fmt: skip


@dataclass(frozen=True)
class Serial(Recipe):
    """One scatter or scan along a dimension, something before it and something behind."""

    form: str = "cumsum"
    shape: tuple[int, ...] = (64, 17)
    dim: int = 0
    sources: int = 333
    before: str = "none"
    behind: str = "none"
    result: str = "whole"

    @staticmethod
    def draw(seed: int) -> Serial:
        """Return a recipe by seed."""
        pick = random.Random(seed)
        shape = [pick.choice(EXTENTS) for _ in range(pick.choice((1, 2, 2, 3)))]
        while torch.Size(shape).numel() < ELEMENTS:
            shape[pick.randrange(len(shape))] *= 7
        form, result = pick.choice(FORMS), pick.choice(list(RESULTS))
        whole = form in ("cummax", "amax") or result == "largest"
        return Serial(
            dtype=pick.choice(("float32", "float32", "float64", "bfloat16")),
            layouts=tuple(pick.choice(LAYOUTS) for _ in range(pick.randrange(3))),
            train=not whole and pick.random() < 0.7,
            seed=seed,
            form=form,
            shape=tuple(shape),
            dim=pick.randrange(len(shape)),
            sources=pick.choice(SOURCES),
            before=pick.choice(PLAIN),
            behind=pick.choice(PLAIN),
            result=result,
        )

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that ``run`` takes: the target, the sources, where they go."""
        source = (*self.shape[: self.dim], self.sources, *self.shape[self.dim + 1 :])
        size = self.shape[self.dim]
        index = values(self.sources, dtype=torch.int64, low=0, high=size, seed=self.seed)
        return self.tensor(0, *self.shape), self.tensor(1, *source), index

    def run(self, x: Tensor, s: Tensor, i: Tensor) -> Any:
        """Compute the model."""
        first, then = (STEPS.get(step, lambda y: y) for step in (self.before, self.behind))
        return RESULTS[self.result](then(self._serial(first(x), first(s), i)))

    def _serial(self, x: Tensor, s: Tensor, i: Tensor) -> Tensor:
        dim = self.dim
        everywhere = i.view(*(-1 if d == dim else 1 for d in range(x.dim()))).expand(s.shape)
        match self.form:
            case "cumsum":
                return x.cumsum(dim)
            case "cumprod":
                return (1 + x * 1e-3).cumprod(dim)
            case "cummax":
                return x.cummax(dim)[0]
            case "index_add":
                return x.index_add(dim, i, s)
            case "scatter_add":
                return torch.zeros_like(x).scatter_add(dim, everywhere, s)
            case "index_put":
                turned = x.transpose(0, dim)
                added = turned.index_put((i,), s.transpose(0, dim), accumulate=True)
                return added.transpose(0, dim)
            case "amax":
                return x.scatter_reduce(dim, everywhere, s, "amax")
            case "mean":
                return x.scatter_reduce(dim, everywhere, s, "mean", include_self=False)
            case "embedding":
                return F.embedding(i, x.reshape(x.shape[0], -1)) if dim == 0 else x[..., :1] * x
            case "twice":
                y = x.index_add(dim, i, s)
                return y + x.cumsum(dim) * y.index_select(dim, i).sum(dim, keepdim=True) * 1e-3
            case _:
                return x.index_select(dim, i)
