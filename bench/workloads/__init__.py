"""The workloads, one file a group; `cpu()` and `gpu()` list them in the order of measurement."""

from __future__ import annotations

from bench.workload import Workload
from bench.workloads import blocks, losses, norms, pointwise, softmax


def cpu() -> list[Workload]:
    """What `bench.cpu` measures."""
    groups = (pointwise, norms, softmax, losses, blocks)
    return [workload for group in groups for workload in group.cpu()]


def gpu() -> list[Workload]:
    """What `bench.gpu` measures, most telling first: time may run out."""
    groups = (pointwise, norms, softmax, losses, blocks)
    found = [workload for group in groups for workload in group.gpu()]
    return sorted(found, key=lambda w: (w.group == "blocks", w.train))
