"""Attention as it is written down: `fusec explain examples/attention.py:attention --input ...`."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the values ``v[b, h, j, d]``, weighted by the softmax of ``q @ k`` over ``j``."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ v
