"""Which composite operations AOTAutograd takes apart before fusec sees the graph.

PyTorch's core set, with two changes. Attention stays whole, forward and backward: the core set
takes apart only its forward, after which gradients are wrong. The composites whose parts fuse
well (norms, softmax, GELU, biased products, embedding, dropout) are taken apart as well;
``var_mean`` and ``sigmoid`` are not, since their parts are primitives below ATen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

_ALSO = (
    "native_layer_norm",
    "_softmax",
    "_log_softmax",
    "gelu",
    "native_dropout",
    "addmm",
    "baddbmm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "native_group_norm",
    "embedding",
    "relu",
)

_WHOLE = ("scaled_dot_product", "embedding_dense_backward")
"""Kept whole. An embedding's gradient is one eager kernel; its parts are a fill, a scatter and masks."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decomposition table for AOTAutograd; a new dict of cached contents."""
    return dict(_table())


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        target: rule
        for target, rule in core_aten_decompositions().items()
        if not any(name in str(target) for name in _WHOLE)
    }
    packets = [getattr(torch.ops.aten, name) for name in _ALSO]
    targets = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    table.update(get_decompositions(targets))
    return table
