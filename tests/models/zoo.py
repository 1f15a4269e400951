"""Small models with random weights, built from configurations: nothing is downloaded.

Widths are odd on purpose (head dimension 12, vocabulary 101), so that tails are reached.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")
PreTrainedModel, PretrainedConfig = transformers.PreTrainedModel, transformers.PretrainedConfig

VOCABULARY = 101
ATTENTIONS = ("sdpa", "eager")


class Logits(nn.Module):
    """A transformers model that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(ids, attention_mask=mask, use_cache=False).logits


class Plain(Logits):
    """The same for models without a cache of keys and values, also for images."""

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return self.model(inputs).logits
        return self.model(inputs, attention_mask=mask).logits


class Loss(nn.Module):
    """A language model with its loss: next tokens for causal models, the same for others."""

    def __init__(self, model: nn.Module, *, shift: bool) -> None:
        super().__init__()
        self.model, self.shift = model, shift

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids)
        if self.shift:
            logits, ids = logits[:, :-1], ids[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def gpt2(attention: str = "sdpa", layers: int = 2) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=layers, n_head=4, n_embd=48, n_positions=64, vocab_size=VOCABULARY,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    return seeded_model(lambda: Logits(transformers.GPT2LMHeadModel(config)))


def bert(attention: str = "sdpa", layers: int = 2) -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=layers, num_attention_heads=4, hidden_size=48, intermediate_size=100,
        max_position_embeddings=64, vocab_size=VOCABULARY, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    return seeded_model(lambda: Plain(transformers.BertForMaskedLM(config)))


def llama(attention: str = "sdpa", layers: int = 2) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, hidden_size=48,
        intermediate_size=100, max_position_embeddings=64, vocab_size=VOCABULARY,
        attn_implementation=attention,
    )  # fmt: skip
    return seeded_model(lambda: Logits(transformers.LlamaForCausalLM(config)))


def vit(attention: str = "sdpa", layers: int = 2) -> nn.Module:
    config = transformers.ViTConfig(
        num_hidden_layers=layers, num_attention_heads=4, hidden_size=48, intermediate_size=100,
        image_size=24, patch_size=8, num_labels=7, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    return seeded_model(lambda: Plain(transformers.ViTForImageClassification(config)))


LANGUAGE_MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
}


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, width: int = 40, depth: int = 2, classes: int = 5, **kwargs) -> None:
        super().__init__(**kwargs)
        self.width, self.depth, self.classes = width, depth, classes


class OwnModel(PreTrainedModel):
    """What a user writes: a PreTrainedModel with buffers, ALiBi, gated units, a dict as output."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        w = config.width
        self.embed = nn.Embedding(VOCABULARY, w, padding_idx=0)
        self.norms = nn.ModuleList(nn.LayerNorm(w) for _ in range(config.depth))
        self.qkv = nn.ModuleList(nn.Linear(w, 3 * w) for _ in range(config.depth))
        self.gates = nn.ModuleList(nn.Linear(w, 2 * w, bias=False) for _ in range(config.depth))
        self.scale = nn.Parameter(torch.full((config.depth,), 0.5))
        self.head = nn.Linear(w, config.classes)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]), persistent=True)
        self.post_init()

    def attend(self, qkv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, t, _ = qkv.shape
        q, k, v = (p.view(b, t, 2, -1).transpose(1, 2) for p in qkv.chunk(3, -1))
        steps = torch.arange(t, device=qkv.device)
        distance = (steps[None, :] - steps[:, None]).to(qkv.dtype)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.slopes[:, None, None] * distance
        hidden = (steps[None, :] > steps[:, None]) | ~mask[:, None, None, :]
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = input_ids != 0
        h = self.embed(input_ids)
        for i, (norm, qkv, gate) in enumerate(zip(self.norms, self.qkv, self.gates, strict=True)):
            h = h + self.scale[i] * self.attend(qkv(norm(h)), mask)
            h = h + F.glu(gate(h), dim=-1)
        weight = mask.unsqueeze(-1).to(h.dtype)
        pooled = (h * weight).sum(1) / weight.sum(1).clamp(min=1)
        return {"logits": self.head(torch.tanh(pooled)), "hidden": h}


def own_model() -> nn.Module:
    return seeded_model(lambda: OwnModel(OwnConfig()))


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, a projected shortcut, ReLU in place."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNextBlock(nn.Module):
    """A depthwise convolution, LayerNorm over channels, two linear layers, a scaled residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


def resnet() -> nn.Module:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            ResidualBlock(6, 10, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 5),
        )  # fmt: skip

    return seeded_model(build)


def mlp() -> nn.Module:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(33), nn.Linear(33, 70), nn.GELU(), nn.Dropout(0.0),
            nn.Linear(70, 9), nn.LogSoftmax(-1),
        )  # fmt: skip

    return seeded_model(build)


def seeded_model(build: Callable[[], nn.Module]) -> nn.Module:
    """Build with reproducible weights that are not all tiny, zero or one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.add_(noise * (0.1 if parameter.dim() > 1 else 0.2))
    return model.eval()
