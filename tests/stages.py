"""Small programs that between them change something in every stage, and what each stage made.

``steps(name)`` compiles a program and returns, by stage, what the stage took and what it gave where
the two differ. Goldens print them, planted faults spoil what was given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn.attention.flex_attention import flex_attention

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.trace import Trace
from fusec.ir.choice import Choice, Decided
from fusec.options import Options
from fusec.tools.bisect.interpret import Step, record_steps

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Example:
    """A program, its inputs' shapes, and for what it is compiled.

    Attributes:
        inputs: each a shape, or the tensor itself; shapes are filled with random numbers.
        dynamic: dimensions marked as dynamic, as pairs of an input's position and a dimension.
        library: which one computes its products, as a race would say.
    """

    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    target: str = "cpu"
    dtype: torch.dtype = torch.float32
    train: bool = False
    dynamic: tuple[tuple[int, int], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    library: str | None = None

    def tensors(self) -> list[Tensor]:
        """Return the inputs, the same ones each time."""
        generator = torch.Generator().manual_seed(1)
        made = []
        for given in self.inputs:
            if isinstance(given, Tensor):
                made.append(given)
                continue
            drawn = torch.randn(given, generator=generator).to(self.dtype)
            made.append(drawn.requires_grad_(self.train))
        for position, dimension in self.dynamic:
            torch._dynamo.mark_dynamic(made[position], dimension)
        return made


class Behind(nn.Module):
    """Convolutions with an activation and with a residual behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = (nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        return self.deep(F.silu(self.wide(x))) + x


# -- programs --------------------------------------------------------------------------------------


def norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.layer_norm(h, (64,), w), h


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.arange(q.shape[2])
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.5
    return torch.where(rows[:, None] >= rows, scores, float("-inf")).softmax(-1) @ v


def least(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.arange(q.shape[1])
    scores = (q @ k.mT).masked_fill(rows[:, None] < rows, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


def parts(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((F.gelu(x) * y, x * torch.tanh(y) * torch.exp(y)), 1)


def walks(x: Tensor, taps: Tensor) -> Tensor:
    """Along channels, which a convolution along time has last."""
    h = F.conv1d(x.mT, taps, groups=16)
    return (h.cumsum(-1) * h).mT.contiguous()


def cache(held: Tensor, new: Tensor) -> Tensor:
    held[:, 3:4] = new * 2
    return held[:, 0] * 1


def step(p: Tensor, g: Tensor, q: Tensor, h: Tensor, r: Tensor, i: Tensor) -> None:
    for parameter, gradient in ((p, g), (q, h), (r, i)):
        parameter.sub_(gradient, alpha=0.5)


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    def combine(left: Any, right: Any) -> Any:
        return right[0] * left[0], right[0] * left[1] + right[1]

    return associative_scan(combine, (a, b), 0, combine_mode="generic")[1] + 1


def unrolled(a: Tensor, b: Tensor) -> Tensor:
    h, states = torch.zeros_like(b[:, 0]), []
    for t in range(8):
        h = torch.exp(a[:, t]) * h + b[:, t]
        states.append(h)
    return torch.stack(states, 1)


def carried(x: Tensor, w: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t in range(8):
        h = torch.tanh(x[:, t] + h @ w)
    return h


def halved(x: Tensor) -> Any:
    return torch.while_loop(lambda x: x.abs().sum() > 1, lambda x: (x * 0.5,), (x,))


def stack(x: Tensor) -> Tensor:
    steps = [x[:, 0]]
    for step in range(1, 9):  # of two kinds, so that no loop is found
        before = steps[-1].abs() if step % 2 else steps[-1].sin()
        steps.append(before * 0.5 + x[:, step].cumsum(-1))
    return torch.stack(steps)


def steps(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 5)
    for t in range(2):
        h = torch.tanh(x[:, t] @ w.t() + h @ u.t())
    return h


def windows(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1, groups=16).relu()


def masked(x: Tensor, mask: Tensor) -> Tensor:
    y = x * 2
    y[mask] = 1.0
    return y


def dense(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y, torch.cat([x, y], 1).sin()], 1)


def statistics(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = F.gelu(x @ w)
    return h, h.float().sum(-1) - h.float().amax(-1)


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 2).sum(1), (x * 2).sum(1) / x.max(1).values


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + (m - n) * (h + 1))


def weighted(x: Tensor) -> Tensor:
    results, terms = torch.arange(3)[:, None, None], torch.arange(2)[:, None]
    return (torch.where(terms < results, 0.5, 2.0) * x).sum(1)


def turned(x: Tensor, t: Tensor) -> Tensor:
    a, b, c, d = x[..., 0], x[..., 1], t[..., 0], t[..., 1]
    return torch.stack((a * c - b * d, a * d + b * c), -1)


class Filter(nn.Module):
    """A convolution of channels-last images whose channels fill vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x.contiguous(memory_format=torch.channels_last)))


class Scaled(torch.nn.Module):
    """A convolution whose channels are scaled and shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.scale = torch.nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x) * self.scale - self.scale.tanh())


FUSED = {"race": "fused"}
EXAMPLES = {
    "norm": Example(norm, ((8, 64), (8, 64), (64,)), dtype=BF16),
    "norm of 8 lanes": Example(norm, ((8, 64), (8, 64), (64,)), "cpu:avx2", dtype=BF16),
    "attention": Example(
        attention, ((1, 1, 128, 16),) * 3, "sm_90", BF16, train=True, options=FUSED
    ),
    "product": Example(
        lambda x, w: F.gelu(x @ w), ((64, 4096), (4096, 64)), "sm_90", BF16,
        options={**FUSED, "descriptors": "always"},
    ),
    "roles": Example(
        lambda x, w, b: F.gelu(F.linear(x, w, b)), ((256, 128), (256, 128), (256,)), "sm_90", BF16,
        options={**FUSED, "roles": "cooperative"},
    ),
    "products": Example(
        lambda a, b, c, d: torch.relu(a @ b + c @ d), ((32, 48), (48, 64)) * 2, "sm_90", BF16,
        options=FUSED,
    ),
    "tiles": Example(
        lambda x, w: F.relu(x @ w), ((8, 32), (32, 16)), options=FUSED
    ),
    "rows": Example(lambda x, w: F.relu(x @ w.t()), ((2, 32), (8, 32))),
    "groups": Example(
        lambda x, w, s: F.linear(x, (w.view(64, 4, 32).to(x.dtype) * s[..., None]).flatten(1)),
        ((32, 128), torch.ones(64, 128, dtype=torch.int8), (64, 4)), "cpu:amx", BF16,
    ),
    "scores": Example(attention, ((1, 1, 320, 16),) * 3, options=FUSED),
    "weights": Example(
        lambda s, v: torch.bmm(s.softmax(-1), v), ((4, 256, 256), (4, 256, 8)), train=True
    ),
    "least": Example(least, ((1, 320, 16),) * 3, options=FUSED),
    "statistics": Example(statistics, ((256, 64), (64, 512)), "sm_90", BF16, options=FUSED),
    "nested": Example(lambda x: x.sum((2, 3)).sum(0), ((8, 3, 7, 7),), "sm_90"),
    "bias": Example(lambda x, w, b: torch.addmm(b, x, w), ((8, 16), (16, 24), (24,))),
    "library": Example(
        lambda x, w, b: (x.sin() @ w + b, x @ w.t()), ((128, 128), (128, 128), (128,)),
        library="oneDNN",
    ),
    "parts": Example(parts, ((64, 32), (64, 32)), dtype=torch.float64),
    "pairs": Example(turned, ((8, 32, 2), (32, 2))),
    "pairs of a GPU": Example(turned, ((8, 32, 2), (32, 2)), "sm_90"),
    "walks": Example(walks, ((1, 20, 16), (16, 1, 4))),
    "cache": Example(cache, ((4, 64, 16), (4, 1, 16))),
    "step": Example(step, ((4, 4), (4, 4), (32,), (32,), (8, 8), (8, 8)), "sm_90"),
    "loss": Example(
        lambda x, w, t: F.cross_entropy(x @ w, t),
        ((512, 16), (16, 200), torch.arange(512) % 200),
        train=True,
        options={"chunk_bytes": 2000},
    ),
    "columns": Example(lambda x: (x * 2).sum(0), ((40000, 4),)),
    "images": Example(
        lambda x, w: F.conv2d(F.conv2d(x, w, groups=8).relu(), w, groups=8),
        ((2, 8, 99, 99), (8, 1, 3, 3)),
    ),
    "mixed": Example(
        lambda x, w: F.conv2d(x.permute(0, 3, 1, 2), w), ((3, 5, 5, 8), (6, 8, 1, 1)), train=True
    ),
    "dropout": Example(lambda x: F.dropout(x, 0.5) * 2, ((8, 32),)),
    "flex": Example(flex, ((1, 2, 16, 16),) * 3),
    "behind": Example(Behind(), ((1, 8, 9, 9),), options={"freeze": True}),
    "terms": Example(weighted, ((2, 256),)),
    "steps": Example(steps, ((2, 2, 6), (5, 6), (5, 5)), train=True),
    "running": Example(lambda x: (x * 2).cumsum(1) * x, ((4, 100),)),
    "filter": Example(Filter(), ((4, 16, 16, 16),), "cpu:avx512"),
    "stack": Example(stack, ((2, 9, 4),)),
    "windows": Example(
        windows, (torch.ones(4, 16, 16, 16).movedim(3, 1), (16, 1, 3, 3)), "cpu:avx512"
    ),
    "narrow": Example(lambda x, w: x @ w, ((32, 32), (32, 32)), "cpu:avx2", dtype=BF16),
    "narrow images": Example(
        lambda x, w: F.conv2d(x, w, padding=1), ((1, 4, 8, 8), (4, 4, 3, 3)), "cpu:avx2", dtype=BF16
    ),
    "scaled": Example(Scaled(), ((1, 3, 8, 8),), options={"freeze": True}),
    "masked": Example(masked, ((8, 32), torch.arange(256).view(8, 32) % 3 == 0)),
    "recurrence": Example(recurrence, ((3, 8), (3, 8))),
    "unrolled": Example(unrolled, ((4, 8), (4, 8))),
    "carried": Example(carried, ((2, 8, 4), (4, 4))),
    "halved": Example(halved, ((4, 8),)),
    "short rows": Example(
        lambda x, w, b: F.layer_norm(x, (1104,), w, b), ((64, 1104), (1104,), (1104,)), "sm_90",
        BF16, train=True,
    ),
    "dense": Example(dense, ((8, 3), (8, 5)), train=True),
    "upsample": Example(
        lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), ((1, 2, 6, 6),), train=True
    ),
    "rounding": Example(
        lambda x, y: (x + y) * x, ((8, 32), (8, 32)), dtype=BF16, options={"precision": "eager"}
    ),
    "widths": Example(
        lambda x, u, y, v, z, w: (x * u, y * v, z * w),
        ((32, 192), (192,), (32, 320), (320,), (32, 256), (256,)),
    ),
    "twice": Example(twice, ((8, 32),)),
    "gathered": Example(lambda x, i: x[i] * 2, ((40, 64), torch.arange(8) * 5), "sm_90"),
    "lengths": Example(
        F.scaled_dot_product_attention, ((1, 2, 6, 16), (1, 2, 7, 16), (1, 2, 7, 16)),
        dynamic=((1, 2), (2, 2)),
    ),
}  # fmt: skip


def _in_library(library: str, choice: Choice) -> Decided:
    """Call products in a library; decide everything else by rule."""
    if choice.kind != "product":
        return choice.by_rule()
    return Decided(library, "as told", 1.0)


@functools.cache
def steps(name: str) -> tuple[Step, ...]:
    """Return the runs of stages that changed something while an example was compiled."""
    example = EXAMPLES[name]
    options = Options.from_compile(None, {"verify": True, "strict": True, **example.options})
    context = CompileContext(find_target(example.target), options, Trace("joint"))
    if example.library is not None:
        context = replace(context, judge=functools.partial(_in_library, example.library))
    dynamic = None if example.dynamic else False
    return record_steps(
        example.fn, example.tensors(), context, train=example.train, dynamic=dynamic
    )


def step_of(stage: str, example: str) -> Step:
    """Return the first run of a stage in an example's compile that changed something."""
    return next(step for step in steps(example) if step.stage == stage)
