"""Numbers that eager refuses, refused by compiled calls, too; those that it takes are as eager's.

A row is an operation with a number that its tensor's type cannot hold, or that it asks not to be
given. Where eager raises a compiled call raises; where eager computes, results are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support import BACKEND

f = torch.tensor([0.5, 1.0, 2.0])
h, hh, d = f.bfloat16(), f.half(), f.double()
i = torch.tensor([1, 2, 3])
i32, u8, i8 = i.int(), i.byte(), i.to(torch.int8)
p, t = torch.tensor([0.2, 1.2, 0.4]), torch.tensor([0.0, 1.0, 1.0])

CASES: dict[str, tuple[Any, ...]] = {
    "clamp f32 max 3.5e38": (lambda x: x.clamp(max=3.5e38), f),
    "clamp f32 min -3.5e38": (lambda x: x.clamp(min=-3.5e38), f),
    "clamp f32 inf": (lambda x: x.clamp(max=float("inf")), f),
    "clamp f16 7e4": (lambda x: x.clamp(max=7e4), hh),
    "clamp bf16 1e39": (lambda x: x.clamp(max=1e39), h),
    "clamp_ f32": (lambda x: x.clone().clamp_(max=3.5e38), f),
    "clamp_min f32": (lambda x: x.clamp_min(3.5e38), f),
    "clamp_max f16": (lambda x: x.clamp_max(7e4), hh),
    "clamp i32 2**40": (lambda x: x.clamp(-(2**40), 2**40), i32),
    "clamp i64 2**70": (lambda x: x.clamp(max=2**63 - 1), i),
    "clamp u8 300": (lambda x: x.clamp(-5, 300), u8),
    "clamp i8 200": (lambda x: x.clamp(max=200), i8),
    "hardtanh 3.5e38": (lambda x: F.hardtanh(x, -1, 3.5e38), f),
    "full_like u8 300": (lambda x: torch.full_like(x, 300), u8),
    "full i32 2**40": (lambda x: torch.full((3,), 2**40, dtype=torch.int32) + x, i32),
    "full f16 1e6": (lambda x: torch.full((3,), 1e6, dtype=torch.float16) + x, hh),
    "full f32 1e39": (lambda x: torch.full((3,), 1e39) + x, f),
    "fill u8": (lambda x: x.clone().fill_(300), u8),
    "fill f32 1e39": (lambda x: x.clone().fill_(1e39), f),
    "masked_fill u8 300": (lambda x: x.masked_fill(x > 1, 300), u8),
    "masked_fill f32 1e39": (lambda x: x.masked_fill(x > 1, 1e39), f),
    "masked_fill f16 -1e9": (lambda x: x.masked_fill(x > 1, -1e9), hh),
    "masked_fill bf16 -1e39": (lambda x: x.masked_fill(x > 1, -1e39), h),
    "masked_fill i32 2**40": (lambda x: x.masked_fill(x > 1, 2**40), i32),
    "where f16 1e6": (lambda x: torch.where(x > 1, x, 1e6), hh),
    "where f32 1e39": (lambda x: torch.where(x > 1, x, 1e39), f),
    "where i32 2**40": (lambda x: torch.where(x > 1, x, 2**40), i32),
    "pad f16 1e6": (lambda x: F.pad(x, (1, 1), value=1e6), hh),
    "pad f32 1e39": (lambda x: F.pad(x, (1, 1), value=1e39), f),
    "add u8 300": (lambda x: x + 300, u8),
    "add i32 2**40": (lambda x: x + 2**40, i32),
    "add f32 1e39": (lambda x: x + 1e39, f),
    "add f16 1e6": (lambda x: x + 1e6, hh),
    "add bf16 1e39": (lambda x: x + 1e39, h),
    "sub u8 300": (lambda x: x - 300, u8),
    "mul u8 300": (lambda x: x * 300, u8),
    "mul f16 1e6": (lambda x: x * 1e6, hh),
    "mul f32 1e39": (lambda x: x * 1e39, f),
    "div f16 1e6": (lambda x: x / 1e6, hh),
    "rsub u8 300": (lambda x: 300 - x, u8),
    "floordiv u8 300": (lambda x: x // 300, u8),
    "rem u8 300": (lambda x: x % 300, u8),
    "rem f16 1e6": (lambda x: x % 1e6, hh),
    "fmod f32 1e39": (lambda x: torch.fmod(x, 1e39), f),
    "add alpha u8 300": (lambda x: torch.add(x, x, alpha=300), u8),
    "add alpha 1e39": (lambda x: torch.add(x, x, alpha=1e39), f),
    "addcmul 1e39": (lambda x: torch.addcmul(x, x, x, value=1e39), f),
    "addcdiv f16 1e6": (lambda x: torch.addcdiv(x, x, x, value=1e6), hh),
    "lerp 1e39": (lambda x: torch.lerp(x, x, 1e39), f),
    "eq u8 300": (lambda x: x == 300, u8),
    "lt u8 300": (lambda x: x < 300, u8),
    "lt i32 2**40": (lambda x: x < 2**40, i32),
    "lt f16 1e6": (lambda x: x < 1e6, hh),
    "lt f32 1e39": (lambda x: x < 1e39, f),
    "eq bf16 1e39": (lambda x: x == 1e39, h),
    "and u8 300": (lambda x: x & 300, u8),
    "threshold 1e39": (lambda x: F.threshold(x, 1e39, 0.0), f),
    "threshold u8": (lambda x: F.threshold(x, 300, 7), u8),
    "leaky 1e39": (lambda x: F.leaky_relu(x, 1e39), f),
    "elu 1e39": (lambda x: F.elu(x, 1e39), f),
    "softplus 1e39": (lambda x: F.softplus(x, 1e39), f),
    "softshrink -1": (lambda x: F.softshrink(x, -1.0), f),
    "celu 0": (lambda x: F.celu(x, 0.0), f),
    "nan_to_num f16": (lambda x: torch.nan_to_num(x, nan=1e6), hh),
    "copysign 1e39": (lambda x: torch.copysign(x, 1e39), f),
    "index_fill u8 300": (lambda x: x.index_fill(0, torch.tensor([0]), 300), u8),
    "index_fill 1e39": (lambda x: x.index_fill(0, torch.tensor([0]), 1e39), f),
    "scatter value 300": (lambda x: x.scatter(0, torch.tensor([0]), 300), u8),
    "scatter value 1e39": (lambda x: x.scatter(0, torch.tensor([0]), 1e39), f),
    "bce 1.2": (lambda p, t: F.binary_cross_entropy(p, t), p, t),
    "bce none -0.1": (lambda p, t: F.binary_cross_entropy(p - 1.1, t, reduction="none"), p, t),
    "bce nan": (lambda p, t: F.binary_cross_entropy(p / 0 * 0, t), p, t),
    "bce target 1.5": (lambda p, t: F.binary_cross_entropy(p / 2, t * 1.5), p, t),
    "bce weight": (lambda p, t: F.binary_cross_entropy(p, t, weight=t), p, t),
    "bce logits": (lambda p, t: F.binary_cross_entropy_with_logits(p * 9, t * 3), p, t),
    "bernoulli 1.2": (lambda p: torch.bernoulli(p), p),
    "bernoulli scalar": (lambda p: torch.bernoulli(p, 1.2), p),
}


def outcome(call: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    try:
        return call(*[x.clone() for x in inputs])
    except Exception as error:
        return error


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_what_eager_refuses_is_refused(name: str) -> None:
    torch.compiler.reset()
    function, *inputs = CASES[name]
    eager = outcome(function, *inputs)
    found = outcome(torch.compile(function, backend=BACKEND), *inputs)
    if isinstance(eager, Exception):
        assert isinstance(found, Exception), f"{found} where eager raises {eager!r}"
    else:
        assert not isinstance(found, Exception), repr(found)
        torch.testing.assert_close(found, eager, equal_nan=True)
