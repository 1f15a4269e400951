"""Layers of experts of transformers on CPUs, and models of two such layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from bench.workload import Case, Workload
from bench.workloads.blocks import default_dtype
from bench.workloads.loops import Logits

LAYERS: Mapping[str, tuple[str, str, str]] = {
    "mixtral": ("mixtral", "Mixtral", "SparseMoeBlock"),
    "qwen3 moe": ("qwen3_moe", "Qwen3Moe", "SparseMoeBlock"),
    "gpt-oss": ("gpt_oss", "GptOss", "MLP"),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3", "MoE"),
}
"""A name -> the folder of transformers, and how the names of its classes begin and end."""


class Experts(nn.Module):
    """What has experts; in f64, for which PyTorch has no grouped product, it loops over them."""

    def __init__(self, inner: nn.Module, config: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, config

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)

    def double(self) -> Experts:
        self.config._experts_implementation = "eager"
        return super().double()


def experts_of(name: str, width: int) -> Mapping[str, Any]:
    """Return a configuration of experts that read and write ``width`` columns, in proportion."""
    match name:
        case "mixtral":  # 2 of 8
            return {"num_local_experts": 8, "intermediate_size": 2 * width}
        case "qwen3 moe":
            return {"num_experts": 64, "num_experts_per_tok": 8,
                    "moe_intermediate_size": 3 * width // 8}  # fmt: skip
        case "gpt-oss":
            return {"num_local_experts": 24, "num_experts_per_tok": 4,
                    "intermediate_size": 3 * width // 4}  # fmt: skip
        case _:  # of half of 8 groups, beside one that is always taken
            return {"n_routed_experts": 64, "n_group": 8, "topk_group": 4,
                    "num_experts_per_tok": 8, "moe_intermediate_size": width // 4,
                    "intermediate_size": 2 * width, "first_k_dense_replace": 1}  # fmt: skip


def layer(
    dtype: torch.dtype, device: str, shrink: int, *, tokens: int, how: str, name: str
) -> Case:
    """A layer with its router, 1024 wide, with one sequence.

    Args:
        how: the layer's spelling in transformers, ``grouped_mm`` or ``batched_mm``.
    """
    folder, begin, end = LAYERS[name]
    modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
    width = max(64, 1024 // shrink)
    config = getattr(modeling, f"{begin}Config")(hidden_size=width, **experts_of(name, width))
    config._experts_implementation = how
    with default_dtype(dtype):
        made = getattr(modeling, begin + end)(config)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return Case(Experts(made, config), (torch.randn(1, tokens, width).to(dtype),))


def model(dtype: torch.dtype, device: str, shrink: int, *, tokens: int, name: str) -> Case:
    """A model of two layers, 512 wide, from tokens to logits."""
    folder, begin, _ = LAYERS[name]
    modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
    width = max(64, 512 // shrink)
    latent = {"kv_lora_rank": 128, "q_lora_rank": 192, "qk_rope_head_dim": 32,
              "qk_nope_head_dim": 32, "v_head_dim": 64}  # fmt: skip
    config = getattr(modeling, f"{begin}Config")(
        vocab_size=1024, hidden_size=width, num_hidden_layers=2, num_attention_heads=8,
        use_cache=False, **experts_of(name, width),
        **(latent if name == "deepseek-v3" else {"num_key_value_heads": 2, "head_dim": 64}),
    )  # fmt: skip
    with default_dtype(dtype):
        made = getattr(modeling, f"{begin}ForCausalLM")(config)
    made.set_experts_implementation("grouped_mm")
    ids = torch.randint(3, 1024, (1, max(8, tokens // shrink)))
    return Case(Experts(Logits(made), made.config), (ids,))


def cpu() -> list[Workload]:
    rows = [(tokens, "grouped_mm") for tokens in (1, 16, 64)] + [(1, "batched_mm")]
    layers = [
        Workload(
            "experts on CPUs",
            f"{name} layer {how} {tokens} tokens",
            partial(layer, tokens=tokens, how=how, name=name),
            dtype=dtype,
        )
        for name in LAYERS
        for tokens, how in rows
        for dtype in ("fp32", "bf16")
    ]
    models = [
        Workload(
            "models of experts on CPUs",
            f"{name} model {tokens} tokens",
            partial(model, tokens=tokens, name=name),
            train,
        )
        for name in LAYERS
        for tokens in (128,)
        for train in (False, True)
    ]
    return [*layers, *models]
