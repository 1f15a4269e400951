"""Operands on the device, and a product with an epilogue, for the tests of plans."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support import values


def on_device(*shape, dtype=torch.bfloat16, seed=0, scale=1.0):
    return (values(*shape, seed=seed) * scale).to(dtype).cuda()


def linear_and_gelu(x, w, b):
    return F.gelu(F.linear(x, w, b))


def operands(m, k, n, dtype=torch.bfloat16):
    x, w = on_device(m, k, dtype=dtype), on_device(n, k, dtype=dtype, seed=1, scale=k**-0.5)
    return x, w, on_device(n, dtype=dtype, seed=2)
