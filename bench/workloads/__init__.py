"""The workloads, one file a group; `cpu()` and `gpu()` list them in the order of measurement."""

from __future__ import annotations

from bench.workload import Workload
from bench.workloads import (
    attention,
    blocks,
    convnets,
    decoding,
    experts,
    images,
    integers,
    loops,
    losses,
    models,
    norms,
    optimizers,
    pointwise,
    products,
    rnn_layers,
    softmax,
    vision,
)


def cpu() -> list[Workload]:
    """What `bench.cpu` measures."""
    groups = (
        *(pointwise, norms, softmax, attention, images, losses, blocks, models, optimizers),
        *(vision, convnets, experts, rnn_layers, loops, integers),
    )
    return [workload for group in groups for workload in group.cpu()]


ORDER = (
    "first", "products", "attention", "decoding", "linear + loss", "memory-bound", "optimizers",
    "blocks", "products, tuned",
)  # fmt: skip
FIRST = ("residual+rmsnorm 8192x4096", "bias+gelu+residual 8192x4096")
"""Cheap rows whose result is known within a few percent: if they are wrong, so is the rest."""


def gpu() -> list[Workload]:
    """What `bench.gpu` measures, cheapest and most telling first: time may run out."""
    groups = (products, attention, decoding, losses, pointwise, norms, softmax, blocks, optimizers)
    found = [workload for group in groups for workload in group.gpu()]
    return sorted(found, key=_rank)


def _rank(workload: Workload) -> tuple[int, bool]:
    first = workload.name in FIRST and not workload.train
    return ORDER.index("first" if first else workload.group), workload.train
