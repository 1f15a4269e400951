"""A training step of GPT-2 XL, to look at: ``fusec report`` builds it without memory for weights.

fusec report examples/gpt2_xl.py:step --input 'i64[1,1024]<50257' --train --target sm_90
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


class Step(nn.Module):
    """The loss of the next token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def step() -> nn.Module:
    """Return GPT-2 XL, 1.6 billion weights, with its loss."""
    layers = {"n_layer": 48, "n_embd": 1600, "n_head": 25}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**layers, **no_dropout))
    return Step(model.to(torch.bfloat16))
