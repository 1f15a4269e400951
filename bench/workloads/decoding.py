"""One step of decoding: a query for each sequence against its cache, layers of 1 or 16 rows.

Sizes are Llama-3-8B's; one head of keys for each query, too. All of it waits for memory: the floor
is the cache, or the weights, read once.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F

from bench.workload import VARIANTS, Case, Workload, shrunk
from bench.workloads.products import linear_residual, swiglu

GROUP = "decoding"
DEPTH = 128


def attention(
    dtype: torch.dtype,
    device: str,
    shrink: int,
    *,
    batch: int,
    heads: int,
    groups: int,
    keys: int = 4096,
) -> Case:
    """One query of `heads * groups` heads, each `groups` of which share a head of keys."""
    batch, keys = max(1, batch // shrink), shrunk(keys, shrink)
    q = torch.randn(batch, heads * groups, 1, DEPTH, device=device).to(dtype)
    k, v = (torch.randn(batch, heads, keys, DEPTH, device=device).to(dtype) for _ in range(2))
    return Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (q, k, v),
        flops=4 * math.prod(q.shape) * keys,
    )


def cpu() -> list[Workload]:
    return []


def gpu() -> list[Workload]:
    builds = {
        f"attention B{batch} heads {heads * groups} of {heads} keys 4096": functools.partial(
            attention, batch=batch, heads=heads, groups=groups
        )
        for batch, heads, groups in ((1, 8, 4), (16, 8, 4), (1, 32, 1), (16, 32, 1))
    }
    for rows in (1, 16):
        sized = functools.partial(linear_residual, rows=rows, bias=False)
        builds[f"o+residual rows {rows}"] = functools.partial(sized, k=4096, n=4096)
        builds[f"down+residual rows {rows}"] = functools.partial(sized, k=14336, n=4096)
        builds[f"swiglu rows {rows}"] = functools.partial(swiglu, rows=rows, k=4096, n=14336)
    return [
        Workload(GROUP, name, build, dtype="bf16", peers=VARIANTS, seconds=15)
        for name, build in builds.items()
    ]
