"""A block of each model that `make emulate` trains in the emulator, small enough for it.

fusec check --emulate tests/tools/emulator/blocks.py:gpt2 --input bf16[2,24,64] --train
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.vit.modeling_vit import ViTLayer

WIDTH, HEADS = 64, 2


class First(nn.Module):
    """A layer that returns its hidden states, alone or before others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self.layer(x)
        return found if isinstance(found, Tensor) else found[0]


def gpt2() -> nn.Module:
    return First(GPT2Block(gpt2_config(WIDTH, HEADS), layer_idx=0))


def gpt2_small() -> nn.Module:
    """A block of GPT-2 small, in its own width."""
    return First(GPT2Block(gpt2_config(768, 12), layer_idx=0))


def gpt2_config(width: int, heads: int) -> GPT2Config:
    return GPT2Config(
        n_embd=width, n_head=heads, n_layer=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        attn_implementation="sdpa",
    )  # fmt: skip


def bert() -> nn.Module:
    return First(
        BertLayer(
            BertConfig(
                hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                attn_implementation="sdpa",
            )
        )
    )  # fmt: skip


def vit() -> nn.Module:
    return First(
        ViTLayer(
            ViTConfig(
                hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                attn_implementation="sdpa",
            )
        )
    )  # fmt: skip


class Llama(nn.Module):
    """A decoder layer with its rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=1,
            intermediate_size=3 * WIDTH, attn_implementation="sdpa",
        )  # fmt: skip
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        found: Any = self.layer(x, position_embeddings=self.rotary(x, positions))
        return found if isinstance(found, Tensor) else found[0]


def llama() -> nn.Module:
    return Llama()
