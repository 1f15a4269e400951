"""Training with products of 8 bits in plain torch: scales of this step, or of earlier ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusec
from tests.support import compile_with, seeded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scale_of(largest: Tensor, kind: torch.dtype) -> Tensor:
    return largest.float().clamp(min=1e-12) / torch.finfo(kind).max


def to_8_bits(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    most = torch.finfo(kind).max
    return (x.float() / scale).clamp(-most, most).to(kind)


def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def gradients(
    g: Tensor, scale: Tensor, xq: Tensor, wq: Tensor, sx: Tensor, sw: Tensor
) -> tuple[Tensor, Tensor]:
    gq = to_8_bits(g, scale, E5M2)
    dx = torch._scaled_mm(gq, by_columns(wq), scale, sw, out_dtype=g.dtype)
    dw = torch._scaled_mm(gq.t().contiguous(), by_columns(xq), scale, sx, out_dtype=g.dtype)
    return dx, dw


class Dynamic(torch.autograd.Function):
    """A product whose scales are those of the greatest values of its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        sx, sw = scale_of(x.abs().amax(), E4M3), scale_of(w.abs().amax(), E4M3)
        xq, wq = to_8_bits(x, sx, E4M3), to_8_bits(w, sw, E4M3)
        ctx.save_for_backward(xq, wq, sx, sw)
        return torch._scaled_mm(xq, wq.t(), sx, sw, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return gradients(g, scale_of(g.abs().amax(), E5M2), *ctx.saved_tensors)


class Delayed(torch.autograd.Function):
    """A product whose scales are those of earlier steps; it returns this step's greatest values."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, seen_x: Tensor, seen_w: Tensor, seen_g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        sx, sw = scale_of(seen_x.amax(), E4M3), scale_of(seen_w.amax(), E4M3)
        xq, wq = to_8_bits(x, sx, E4M3), to_8_bits(w, sw, E4M3)
        ctx.save_for_backward(scale_of(seen_g.amax(), E5M2), xq, wq, sx, sw)
        largest = x.abs().amax().float(), w.abs().amax().float()
        ctx.mark_non_differentiable(*largest)
        return torch._scaled_mm(xq, wq.t(), sx, sw, out_dtype=x.dtype), *largest

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scale, *saved = ctx.saved_tensors
        return *gradients(g, scale, *saved), None, None, None


class Linear(nn.Module):
    def __init__(self, columns: int, rows: int, delayed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
        self.delayed = delayed
        for name, seen in (("x", 4.0), ("w", 0.5), ("g", 0.05)):
            self.register_buffer(name, torch.full((4,), seen))

    def forward(self, x: Tensor) -> Tensor:
        if not self.delayed:
            return Dynamic.apply(x, self.weight)
        y, *largest = Delayed.apply(x, self.weight, self.x, self.w, self.g)
        for seen, now in zip((self.x, self.w), largest, strict=True):
            seen.copy_(torch.cat((now[None], seen[:-1])))
        return y


class Exact(nn.Module):
    def __init__(self, like: Linear) -> None:
        super().__init__()
        self.weight = like.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Block(nn.Module):
    def __init__(self, delayed: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.up, self.down = Linear(64, 128, delayed), Linear(128, 64, delayed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def block(delayed: bool) -> tuple[Block, Tensor]:
    with seeded(0):
        return Block(delayed).bfloat16(), torch.randn(48, 64).bfloat16()


def step(model: nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    """Return a result, the gradients of the input and of all weights, and the state."""
    x = x.clone().requires_grad_()
    y = call(x)
    y.float().square().sum().backward()
    found = [y, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
    return [t.detach().double() for t in found]


@pytest.mark.parametrize("delayed", [False, True])
def test_a_step_has_at_most_twice_eager_s_error(delayed: bool) -> None:
    eager, x = block(delayed)
    ours, wide = copy.deepcopy(eager), copy.deepcopy(eager).double()
    wide.up, wide.down = Exact(wide.up), Exact(wide.down)
    theirs = step(eager, eager, x)
    made = step(ours, compile_with(ours), x)
    exact = step(wide, wide, x.double())
    results = len(exact) if not delayed else 2 + len(list(ours.parameters()))
    for a, b, c in zip(made[:results], theirs, exact, strict=False):
        error, least = (a - c).norm(), (b - c).norm()
        assert error <= 1.25 * least + 1e-2 * c.norm()
    for a, b in zip(made[results:], theirs[results:], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("delayed", [False, True])
def test_gpus_are_left_with_the_library_s_products_alone(delayed: bool) -> None:
    model, x = block(delayed)
    torch._dynamo.reset()
    options = {"race": "fused"}
    forward, backward = fusec.explain(model, x, train=True, target="sm_90", options=options).graphs
    in_place = {"copy_.default"} if delayed else set()
    assert {call.op for call in forward.externs} <= in_place
    assert {call.op for call in backward.externs} <= {"_scaled_mm.default"}
    assert len(forward.kernels) <= 6 and len(backward.kernels) <= 10
