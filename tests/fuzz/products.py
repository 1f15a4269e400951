"""Random models of matrix products and attentions: recipes that draw, run and print themselves.

A recipe is a frozen dataclass of *ingredients*: names and sizes whose defaults are the plainest
model. ``draw`` picks them by seed, ``run`` computes the model on the recipe's inputs, and
``simpler`` lists the recipes with one ingredient less, so that a failure shrinks by trial. The
``repr`` of a recipe is Python that makes it again.

Worked example: ``Product(k=17, result="row sums")`` is ``y = x @ w; return y, y.sum(-1)`` for x of
16 by 17 and w of 17 by 16.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusec.tools.bisect.smaller import shrink
from tests.support import values, with_layout

SIZES = (16, 17, 24, 33, 40, 48, 50, 64, 65, 100, 129, 256)
TERMS = (1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 50, 64, 65, 100, 129)
FEW = (1, 2, 3, 7, 15)
"""Rows and columns too few for a tile, drawn now and then."""
MOST_TERMS = 300_000
MOST_SCORES = 800_000
"""Multiplications of one model's largest product: half a second in the interpreter."""
DTYPES = ("float32", "float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "contiguous", "transposed", "stepped", "offset", "padded_rows", "expanded")
LOWEST = float("-inf")

Step: TypeAlias = Callable[[Tensor], Tensor]
Results: TypeAlias = Callable[[Tensor], Any]


class Model(nn.Module):
    """A recipe's function. A module, because its numbers stay constants in dynamic compilations."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, *inputs: Tensor) -> Any:
        return self.recipe.run(*inputs)


# -- products --------------------------------------------------------------------------------------

PROLOGUES: dict[str, Step] = {
    "none": lambda x: x,
    "relu": F.relu,
    "scale": lambda x: x * 2.0 + 1.0,
    "gelu": lambda x: F.gelu(x) + 0.1,
    "cast": lambda x: x.bfloat16().to(x.dtype),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x),
    "softmax": lambda x: torch.softmax(x, -1),
    "cat": lambda x: torch.cat([x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :] * 2], -1),
    "pad": lambda x: F.pad(x[..., 1:], (0, 1)),
    "flip": lambda x: x.flip(-1),
    "centred": lambda x: x - x.mean(-2, keepdim=True),
    "column": lambda x: x[..., :1] * x,
    "triangle": lambda x: torch.tril(x),
}

STEPS: dict[str, Step] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "half": lambda y: y * 0.5,
    "square": lambda y: y * y,
    "bf16": lambda y: y.bfloat16().to(y.dtype),
    "f64": lambda y: y.double().mul(0.5).to(y.dtype),
    "where": lambda y: torch.where(y > 0, y, y * 0.1),
    "triangle": torch.tril,
    "in place": lambda y: y.clone().mul_(0.5).add_(1),
    "column": lambda y: y - y[..., :1],
    "clamp": lambda y: y.clamp(-1.5, 2.0),
}
"""Steps with a gradient that jumps where a value is 0, which a rounding to 16 bits moves."""
KINKED = ("relu", "where", "clamp")

RESULTS: dict[str, Results] = {
    "whole": lambda y: y,
    "transposed": lambda y: y.mT.contiguous(),
    "view of it": lambda y: y.mT,
    "row sums": lambda y: (y, y.sum(-1)),
    "sums": lambda y: (y.float().sum(-1), y.float().sum(-2), y.float().sum()),
    "largest": lambda y: (y.amax(-1), y.amin(-2)),
    "softmax": lambda y: torch.softmax(y, -1),
    "column softmax": lambda y: torch.softmax(y, -2),
    "log softmax": lambda y: F.log_softmax(y.float(), -1),
    "logsumexp": lambda y: (torch.logsumexp(y.float(), -1), y),
    "norm": lambda y: F.layer_norm(y, y.shape[-1:]),
    "statistics": lambda y: (y, *torch.var_mean(y.float(), -1, correction=0)),
    "mean square": lambda y: (y, y.float().pow(2).mean(-1, keepdim=True)),
    "several": lambda y: (y, F.relu(y).float(), (y * 0.5).to(torch.float16)),
    "sliced": lambda y: (y[..., ::2].contiguous(), y[..., :1, :] + 1),
    "blocks": lambda y: y.reshape(*y.shape[:-1], -1, 1).permute(*range(y.dim() - 1), -1, -2) + 1,
    "flattened": lambda y: y.reshape(-1) * 2,
    "pairs": lambda y: torch.cat([y, y * 2], -1),
    "place": lambda y: (y, y.float().argmax(-1)),
    "places": lambda y: (y.float().argmax(-2), y.float().argmin(-1)),
    "norm of all": lambda y: y.float().pow(2).sum().sqrt(),
}
"""Results that pick places need equal numbers to be equal: inputs of few integers."""
DISCRETE = ("place", "places")

FORMS = (
    "matmul", "linear", "addmm", "einsum", "turned", "chain", "gated", "shared", "gram", "both",
    "sum of two", "scaled addmm", "in place", "heads", "stacked", "twice",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What all models have.

    Attributes:
        layouts: how the inputs lie in memory, in order; the rest is contiguous.
        whole: inputs are -1, 0 and 1, so that every sum is exact and ties are ties.
        seed: of the inputs' values.
    """

    dtype: str = "float32"
    layouts: tuple[str, ...] = ()
    whole: bool = False
    train: bool = False
    dynamic: bool = False
    seed: int = 0

    def tensor(self, position: int, *shape: int) -> Tensor:
        """Return an input, by its position among them."""
        dtype = getattr(torch, self.dtype)
        tensor = values(*shape, dtype=torch.float32, seed=self.seed + position)
        tensor = tensor.clamp(-1, 1).round() if self.whole else tensor
        layout = self.layouts[position] if position < len(self.layouts) else "contiguous"
        return with_layout(tensor.to(dtype), layout)


@dataclass(frozen=True)
class Product(Recipe):
    """One product or a few, something before them and something behind."""

    form: str = "matmul"
    batch: tuple[int, ...] = ()
    m: int = 16
    k: int = 16
    n: int = 16
    prologue: str = "none"
    residual: bool = False
    steps: tuple[str, ...] = ()
    result: str = "whole"

    @staticmethod
    def draw(seed: int) -> Product:
        """Return a recipe by seed."""
        pick = random.Random(seed)
        form, result = pick.choice(FORMS), pick.choice(list(RESULTS))
        batch = pick.choice(((), (), (), (2,), (3,), (2, 2)))
        m, k, n = _extents(pick)
        points = (10 if form == "chain" else 1) * max(1, sum(batch)) ** 2
        while m * max(k, 32) * n * points > MOST_TERMS:
            m, k, n = _extents(pick)
        whole = result in DISCRETE or pick.random() < 0.1
        steps = [pick.choice(list(STEPS)) for _ in range(pick.choice((0, 0, 1, 1, 2, 3)))]
        dtype = pick.choice(DTYPES)
        train = pick.random() < 0.35 and result not in (*DISCRETE, "largest")
        if whole:
            form = form if form not in ("chain", "gated", "twice") else "matmul"
            steps = [s for s in steps if s in ("half", "where", "relu", "triangle", "clamp")]
        elif train and dtype != "float32":
            steps = [s for s in steps if s not in KINKED]
        return Product(
            dtype=dtype,
            layouts=tuple(pick.choice(LAYOUTS) for _ in range(pick.randrange(4))),
            whole=whole,
            train=train,
            dynamic=pick.random() < 0.1,
            seed=seed,
            form=form,
            batch=batch,
            m=m,
            k=k,
            n=n,
            prologue="none" if whole else pick.choice(("none", *PROLOGUES)),
            residual=pick.random() < 0.4,
            steps=tuple(steps),
            result=result,
        )

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that ``run`` takes."""
        batch = () if self.form in ("addmm", "scaled addmm") else self.batch
        flat = self.form in ("linear", "turned", "both")
        shapes: list[tuple[int, ...]] = [
            (*batch, self.m, self.k),
            (self.n, self.k) if flat else (self.k, self.n),
            (self.n,) if self.form in ("linear", "addmm") else (*batch, self.m, self.n),
            {"chain": (self.n, self.m), "stacked": (3, self.k, self.n)}.get(
                self.form, (self.k, self.n)
            ),
        ]
        return tuple(self.tensor(i, *shape) for i, shape in enumerate(shapes))

    def run(self, x: Tensor, w: Tensor, r: Tensor, v: Tensor) -> Any:
        """Compute the model."""
        y = self._product(PROLOGUES[self.prologue](x), w, r, v)
        if not self.whole:
            y = y * self.k**-0.5
        if self.residual:
            y = y + y.new_ones(y.shape[-1]) * 0.5 if r.dim() == 1 or r.shape != y.shape else y + r
        for step in self.steps:
            y = STEPS[step](y)
        return RESULTS[self.result](y)

    def _product(self, x: Tensor, w: Tensor, r: Tensor, v: Tensor) -> Tensor:
        match self.form:
            case "linear":
                return F.linear(x, w, r)
            case "addmm":
                return torch.addmm(r, x, w)
            case "scaled addmm":
                return torch.addmm(r, x, w, beta=0.5, alpha=2.0)
            case "einsum":
                return torch.einsum("...mk,kn->...mn", x, w)
            case "turned":
                return x @ w.t()
            case "chain":
                return (x @ w * w.shape[-1] ** -0.5) @ v
            case "gated":
                return F.silu(x @ w) * (x @ v)
            case "shared":
                return torch.cat([x @ w, x @ v * 0.5], -1)
            case "gram":
                return x @ x.mT
            case "both":
                return torch.einsum("...mk,nk->...nm", x, w)
            case "sum of two":
                return x @ w + F.relu(x) @ v
            case "in place":
                return (x @ w).add_(r).mul_(2)
            case "heads":
                return (x.unsqueeze(-3) @ torch.stack([w, v])).flatten(-2)
            case "stacked":
                return torch.einsum("...mk,hkn->...hmn", x, v)
            case "twice":
                y = x @ w
                return F.gelu(y) * y + y.sum(-1, keepdim=True) / y.shape[-1]
            case _:
                return x @ w


def _extents(pick: random.Random) -> tuple[int, int, int]:
    m, n = (pick.choice(SIZES if pick.random() < 0.93 else FEW) for _ in range(2))
    return m, pick.choice(TERMS), n


# -- attention -------------------------------------------------------------------------------------


def _by_hand(scores: Tensor) -> Tensor:
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def _with_sink(scores: Tensor) -> Tensor:
    top = scores.amax(-1, keepdim=True).detach().clamp_min(0)
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(-top))


WEIGHTS: dict[str, Step] = {
    "softmax": lambda s: torch.softmax(s, -1),
    "in f32": lambda s: torch.softmax(s.float(), -1).to(s.dtype),
    "to f32": lambda s: torch.softmax(s, -1, dtype=torch.float32).to(s.dtype),
    "by hand": _by_hand,
    "by logarithm": lambda s: torch.exp(s - torch.logsumexp(s, -1, keepdim=True)),
    "log softmax": lambda s: F.log_softmax(s, -1).exp(),
    "no maximum": lambda s: s.exp() / (s.exp().sum(-1, keepdim=True) + 1e-3),
    "sink": _with_sink,
    "sigmoid": torch.sigmoid,
    "relu": lambda s: F.relu(s) / s.shape[-1],
    "nan to num": lambda s: torch.nan_to_num(torch.softmax(s, -1)),
    "two": lambda s: torch.softmax(s, -1) - 0.2 * torch.softmax(s * 0.5, -1),
}

CONDITIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "causal": lambda i, j, w: i >= j,
    "shifted": lambda i, j, w: i + w - 12 >= j,
    "late": lambda i, j, w: i >= j + w,
    "until": lambda i, j, w: j < w,
    "window": lambda i, j, w: (i >= j) & (i - j < w),
    "band": lambda i, j, w: (i - j).abs() <= w,
    "prefix": lambda i, j, w: (i >= j) | (j < w),
    "blocks": lambda i, j, w: i // w >= j // w,
    "thirds": lambda i, j, w: (i - j) % 3 != 1,
    "double": lambda i, j, w: 2 * i + 3 >= j,
    "not below": lambda i, j, w: ~(i + w < j),
    "above": lambda i, j, w: i <= j,
}
FILLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda s, keep: s.masked_fill(~keep, LOWEST),
    "large": lambda s, keep: s.masked_fill(~keep, -1e4),
    "where": lambda s, keep: torch.where(keep, s, LOWEST),
    "added": lambda s, keep: s + torch.zeros_like(s).masked_fill(~keep, LOWEST),
    "least": lambda s, keep: s.masked_fill(~keep, torch.finfo(s.dtype).min),
}
BIASES = ("none", "none", "slope", "keys", "temperature", "full", "cap")
OUTCOMES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "output": lambda o, p, s: o,
    "weights": lambda o, p, s: (o, p),
    "logarithm": lambda o, p, s: (o, torch.logsumexp(s.float(), -1)),
    "columns": lambda o, p, s: (o, p.float().sum(-2)),
    "merged": lambda o, p, s: o.transpose(1, 2).flatten(2),
    "residual": lambda o, p, s: F.relu(o) + 1.0,
    "largest weight": lambda o, p, s: (o, p.float().amax(-1)),
}
CALLS = ("matmul", "matmul", "einsum", "bmm", "sdpa", "sdpa", "mask", "additive mask")
BEFORE: dict[str, Step] = {
    "none": lambda q: q,
    "scale": lambda q: q * 0.5,
    "normalised": lambda q: F.normalize(q.float(), dim=-1).to(q.dtype) * 3,
    "rotated": lambda q: _rotated(q),
    "rms norm": lambda q: q * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(q),
    "heads last": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
}


def _rotated(q: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    angle = torch.arange(q.shape[-2])[:, None] * 0.1 ** (torch.arange(half) / max(half, 1))
    cosine, sine = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    a, b, rest = q[..., :half], q[..., half : 2 * half], q[..., 2 * half :]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], -1)


@dataclass(frozen=True)
class Attention(Recipe):
    """An attention in one of many spellings; ``served`` heads of keys serve ``heads``."""

    call: str = "matmul"
    batch: int = 1
    heads: int = 1
    served: int = 1
    rows: int = 16
    keys: int = 16
    depth: int = 16
    width: int = 16
    before: str = "none"
    scale: str = "mul"
    conditions: tuple[str, ...] = ()
    reach: int = 4
    fill: str = "masked_fill"
    bias: str = "none"
    weights: str = "softmax"
    outcome: str = "output"
    again: bool = False

    @staticmethod
    def draw(seed: int) -> Attention:
        """Return a recipe by seed."""
        pick = random.Random(seed)
        call = pick.choice(CALLS)
        heads = pick.choice((1, 2, 4))
        rows = pick.choice((16, 17, 24, 33, 48, 64, 65, 100, 150))
        depth = pick.choice((16, 16, 24, 33, 64, 80))
        keys, batch = pick.choice((rows, rows, 16, 33, 64, 129)), pick.choice((1, 1, 2))
        while batch * heads * rows * keys * depth > MOST_SCORES:
            heads, rows, keys = 1, pick.choice((16, 17, 33, 64, 65)), pick.choice((rows, 33, 64))
        if pick.random() < 0.05:  # too few for tiles: element by element, and slowly
            rows, keys, heads, batch, depth = 3, pick.choice((3, 17)), 1, 1, 16
        return Attention(
            dtype=pick.choice(DTYPES),
            layouts=tuple(pick.choice(LAYOUTS) for _ in range(pick.randrange(4))),
            train=pick.random() < 0.3,
            dynamic=pick.random() < 0.05,
            seed=seed,
            call=call,
            batch=batch,
            heads=heads,
            served=pick.choice((heads, heads, 1)),
            rows=rows,
            keys=keys,
            depth=depth,
            width=pick.choice((depth, depth, 16, 40)) if "sdpa" not in call else depth,
            before=pick.choice(("none", "none", *BEFORE)),
            scale=pick.choice(("mul", "div", "before", "after", "none")),
            conditions=tuple(
                pick.choice(list(CONDITIONS)) for _ in range(pick.choice((0, 1, 1, 2)))
            ),
            reach=pick.choice((4, 16, 32, 70)),
            fill=pick.choice(list(FILLS)),
            bias=pick.choice(BIASES),
            weights=pick.choice(("softmax", "softmax", *WEIGHTS)),
            outcome=pick.choice(("output", *OUTCOMES)),
            again=pick.random() < 0.1,
        )

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that ``run`` takes."""
        q = (self.batch, self.heads, self.rows, self.depth)
        k = (self.batch, self.served, self.keys, self.depth)
        v = (self.batch, self.served, self.keys, self.width)
        extra: dict[str, tuple[int, ...]] = {
            "temperature": (self.heads, 1, 1),
            "full": (self.heads, self.rows, self.keys),
        }
        last = extra.get(self.bias, (self.batch, 1, 1, self.keys))
        return tuple(self.tensor(i, *s) for i, s in enumerate((q, k, v, last)))

    def run(self, q: Tensor, k: Tensor, v: Tensor, extra: Tensor) -> Any:
        """Compute the model."""
        i = torch.arange(q.shape[2])[:, None]
        j = torch.arange(k.shape[2])
        q, k = BEFORE[self.before](q), BEFORE[self.before](k)
        if self.call in ("sdpa", "mask", "additive mask"):
            return self._library(q, k, v, i, j)
        if self.served != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.served, 1) for t in (k, v))
        scores = self._masked(self._biased(self._scores(q, k), extra, i, j), i, j)
        p = WEIGHTS[self.weights](scores)
        result = OUTCOMES[self.outcome](self._weighted(p, v), p, scores)
        if self.again:
            result = result, self._weighted(torch.softmax(scores * 0.5, -1), v)
        return result

    def _library(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor) -> Tensor:
        causal = self.call == "sdpa" and "causal" in self.conditions
        mask = None
        if self.call != "sdpa":
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
            for condition in self.conditions:
                mask = mask & CONDITIONS[condition](i, j, self.reach)
        if mask is not None and self.call == "additive mask":
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, LOWEST)
        scale = {"mul": None, "none": 1.0}.get(self.scale, 0.3)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=self.served != self.heads,
        )
        return out.transpose(1, 2).flatten(2) if self.outcome == "merged" else out

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        factor = self.depth**-0.5
        if self.scale == "before":
            q = q * factor
        match self.call:
            case "einsum":
                scores = torch.einsum("bhid,bhjd->bhij", q, k)
            case "bmm":
                flat = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
                scores = flat.unflatten(0, (self.batch, self.heads))
            case _:
                scores = q @ k.mT
        match self.scale:
            case "mul":
                return scores * factor
            case "div":
                return scores / self.depth**0.5
            case "none":
                return scores * 0.125
        return scores

    def _biased(self, scores: Tensor, extra: Tensor, i: Tensor, j: Tensor) -> Tensor:
        match self.bias:
            case "slope":
                return scores - (i - j).abs().to(scores.dtype) * 0.0625
            case "keys" | "full":
                return scores + extra
            case "temperature":
                return scores * extra
            case "cap":
                return torch.tanh(scores / 3) * 3
        return scores

    def _masked(self, scores: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for condition in self.conditions:
            scores = FILLS[self.fill](scores, CONDITIONS[condition](i, j, self.reach))
        return scores * self.depth**-0.5 if self.scale == "after" else scores

    def _weighted(self, p: Tensor, v: Tensor) -> Tensor:
        match self.call:
            case "einsum":
                return torch.einsum("bhij,bhje->bhie", p, v)
            case "bmm":
                flat = torch.bmm(p.flatten(0, 1), v.flatten(0, 1))
                return flat.unflatten(0, (self.batch, self.heads))
        return p @ v


# -- shrinking -------------------------------------------------------------------------------------

R = TypeVar("R", bound=Recipe)


def simpler(recipe: R) -> Iterator[R]:
    """Yield the recipes with one ingredient at its default, or one less of a list of them."""
    for field in fields(recipe):
        held, plain = getattr(recipe, field.name), field.default
        if field.name == "seed" or held == plain:
            continue
        yield replace(recipe, **{field.name: plain})
        if isinstance(held, tuple):
            for at in range(len(held) if len(held) > 1 else 0):
                yield replace(recipe, **{field.name: held[:at] + held[at + 1 :]})


def shrunk(recipe: R, fails: Callable[[R], bool], most: int = 60) -> R:
    """Return a recipe that fails and no simpler form of which does, after ``most`` trials."""
    return shrink(recipe, simpler, fails, most)
