"""Layers of experts of transformers on CPUs: each row is multiplied with its expert's weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from bench.workload import Case, Workload
from bench.workloads.blocks import default_dtype

GROUP = "experts on CPUs"


class Layer(nn.Module):
    """A layer of experts; in f64, for which PyTorch has no grouped product, a loop over experts."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            self.layer.experts.config._experts_implementation = "eager"
            y = self.layer(x)
            self.layer.experts.config._experts_implementation = self.how
            return y
        return self.layer(x)


def layer(
    dtype: torch.dtype, device: str, shrink: int, *, tokens: int, how: str, many: bool
) -> Case:
    """A layer of Mixtral, 2 of 8 experts, or of Qwen3's, 8 of 64, with one sequence.

    Args:
        how: the layer's spelling in transformers, ``grouped_mm`` or ``batched_mm``.
    """
    from transformers import MixtralConfig, Qwen3MoeConfig  # local: it takes a second
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    width, hidden = max(64, 1024 // shrink), max(64, (384 if many else 2048) // shrink)
    if many:
        config = Qwen3MoeConfig(
            hidden_size=width, moe_intermediate_size=hidden, num_experts=64, num_experts_per_tok=8
        )
    else:
        config = MixtralConfig(hidden_size=width, intermediate_size=hidden, num_local_experts=8)
    config._experts_implementation = how
    with default_dtype(dtype):
        made = (Qwen3MoeSparseMoeBlock if many else MixtralSparseMoeBlock)(config)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return Case(Layer(made, how), (torch.randn(1, tokens, width).to(dtype),))


def cpu() -> list[Workload]:
    rows = [(tokens, "grouped_mm") for tokens in (1, 16, 64)] + [(1, "batched_mm")]
    return [
        Workload(
            GROUP,
            f"{name} {how} {tokens} tokens",
            partial(layer, tokens=tokens, how=how, many=many),
            dtype=dtype,
        )
        for name, many in (("mixtral layer", False), ("qwen3 moe layer", True))
        for tokens, how in rows
        for dtype in ("fp32", "bf16")
    ]
