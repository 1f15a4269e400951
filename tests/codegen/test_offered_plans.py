"""Each plan that a race may choose for shapes that a seed draws, in the emulator, beside fp64.

What does not build, or computes something else, may not be offered.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.codegen import targets
from fusec.ir.graph import FlatKernel
from fusec.ir.machine import Machine
from fusec.passes.schedule.plan import Plan, print_plan
from fusec.tools.report.emulation import emulate
from tests.tools.emulator.programs import row

COUNT = 40
Case = tuple[Callable[..., Any], list[Tensor], bool]
"""A function, its inputs, and whether it is trained."""


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have programs with roles walk over several tiles."""
    known = targets.TARGETS["sm_90"]
    few = replace(known, machine=replace(known.machine, units=2))
    monkeypatch.setitem(targets.TARGETS, "sm_90", few)


def check(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a case once in each of the plans of its kernels."""
    fn, inputs, train = case
    number, most, known = 0, 1, targets.TARGETS["sm_90"]
    taken: list[str] = []

    def one_of(flat: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
        nonlocal most
        found = known.codegen.plans(flat, machine)
        most = max(most, len(found))
        plan = found[min(number, len(found) - 1)]
        taken.append(print_plan(flat.name, plan))
        return (plan, *(p for p in found if not p.roles))  # roles may come to nothing

    alone = replace(known, codegen=replace(known.codegen, plans=one_of))
    monkeypatch.setitem(targets.TARGETS, "sm_90", alone)
    while number < most:
        torch._dynamo.reset()
        taken.clear()
        found = emulate(fn, inputs, options={"race": "fused"}, seed=seed, train=train)
        shapes = [tuple(x.shape) for x in inputs]
        assert found.faults == (), "\n".join([f"{seed} {shapes}", *taken, str(found)])
        number += 1


# -- attentions ------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return causal(q, k, v) * torch.sigmoid(gate)


def scored(q: Tensor, k: Tensor, v: Tensor, change: Callable[..., Tensor]) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = change((q @ k.mT).float() * q.shape[-1] ** -0.5, i, j)
    return torch.softmax(scores, -1).to(q.dtype) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def change(scores: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((j <= i) & (i - j < 40), scores, float("-inf"))

    return scored(q, k, v, change)


def sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """ALiBi: scores fall with the distance."""

    def change(scores: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j <= i, scores + slopes[:, None, None] * (j - i), float("-inf"))

    return scored(q, k, v, change)


def attention(seed: int) -> Case:
    """Return an attention of up to 160 queries and keys."""
    draw = random.Random(seed)
    fn = draw.choice((plain, causal, biased, gated, windowed, sloped))
    depth = draw.choice((16, 32, 64, 64, 72, 128, 128, 256))
    few, shared = draw.choice((1, 1, 2)), draw.choice((1, 1, 2, 3))
    heads, batch = few * shared, draw.choice((1, 2))
    queries = draw.choice((1, draw.randint(2, 40), draw.randint(41, 160), draw.randint(41, 160)))
    keys = draw.randint(24, 160) if fn in (plain, biased) else queries
    dtype = draw.choice((torch.bfloat16, torch.float16))
    q, k, v = (
        row(n, batch, h, t, depth, dtype=dtype)
        for n, (h, t) in enumerate(((heads, queries), (few, keys), (few, keys)))
    )
    extra = {
        biased: lambda: [row(3, 1, 1, queries, keys, dtype=dtype)],
        gated: lambda: [row(3, batch, heads, queries, depth, dtype=dtype)],
        sloped: lambda: [torch.arange(1, heads + 1) / heads],
    }.get(fn, list)()
    train = fn is not biased and draw.random() < 0.2
    return fn, [q, k, v, *extra], train


# -- products --------------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b) + r
    return y, torch.tanh(y.float())


def swiglu(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w.t()) * (x @ v.t())


def chunked(x: Tensor, w: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def by_columns(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Both weights have their columns side by side in memory."""
    return torch.relu(x.t() @ w) * (x.t() @ v)


def batches(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x @ w)


def product(seed: int) -> Case:
    """Return a product of up to 300 rows, columns and terms."""
    draw = random.Random(seed)
    fn = draw.choice((linear, residual, swiglu, chunked, by_columns, batches))
    m = draw.choice((1, draw.randint(2, 16), draw.randint(17, 300), draw.randint(100, 300)))
    k, n = (8 * draw.randint(2, 37) + draw.choice((0, 0, 0, 1)) for _ in range(2))
    dtype = draw.choice((torch.bfloat16, torch.float16))

    def made(number: int, *shape: int, scale: float = 1.0) -> Tensor:
        return row(number, *shape, dtype=dtype, scale=scale)

    small = k**-0.5
    inputs = {
        linear: lambda: [made(0, m, k), made(1, n, k, scale=small), made(2, n)],
        residual: lambda: [made(0, m, k), made(1, n, k, scale=small), made(2, n), made(3, m, n)],
        swiglu: lambda: [made(0, m, k), *(made(i, n, k, scale=small) for i in (1, 2))],
        chunked: lambda: [made(0, m, k), made(1, 2 * n, k, scale=small)],
        by_columns: lambda: [made(0, k, m), *(made(i, k, n, scale=small) for i in (1, 2))],
        batches: lambda: [made(0, 3, m, k), made(1, 3, k, n, scale=small)],
    }[fn]()
    return fn, inputs, draw.random() < 0.25


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(COUNT))
def test_each_plan_of_a_random_attention_is_right(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(attention(seed), seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(COUNT))
def test_each_plan_of_a_random_product_is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(product(seed), seed, monkeypatch)
