"""Architectures of transformers as a table: a class, a small configuration, what it is called with.

Nothing is downloaded. Weights are random, dropout of any kind is off, and layers are two, because
some architectures alternate between kinds of layers. Inputs come in several sizes: token sequences
of other lengths, images and sounds in batches of other sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from fusec.tools.report.comparison import WidenedCasts
from tests.models.zoo import VOCABULARY, seeded_model
from tests.support import values

transformers = pytest.importorskip("transformers")

SIZES = (3, 2, 5)
"""The numbers of the sizes that inputs are made in; the first is the one for static shapes."""

Inputs: TypeAlias = Callable[[int], dict[str, torch.Tensor]]
"""Makes the keyword arguments of a call, by the number of a size."""


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    Attributes:
        model, config: names of classes of transformers.
        inputs: makes the call's arguments.
        settings: of the configuration.
        outputs: the fields of the result that are compared.
        options: further arguments of the call.
        graphs: how many Dynamo makes; more than one where it breaks the graph, by itself.
        dynamic_graphs: the same for all sizes of ``SIZES`` in turn, with symbolic sizes.
        training: whether the model is in training mode; dropout is off in both.
    """

    model: str
    config: str
    inputs: Inputs
    settings: Mapping[str, Any]
    outputs: tuple[str, ...] = ("logits",)
    options: Mapping[str, Any] = field(default_factory=dict)
    graphs: int = 1
    dynamic_graphs: int = 1
    training: bool = True

    def build(self) -> nn.Module:
        """Return the model, called with the tensors alone."""
        config = getattr(transformers, self.config)(**self.settings)
        _without_dropout(config)
        make = getattr(transformers, self.model)
        model = seeded_model(lambda: Called(make(config), tuple(self.inputs(SIZES[0])), self))
        return model.train(self.training)

    def exact(self, model: nn.Module) -> nn.Module:
        """Return a copy of a built model in f64, where experts have no grouped product."""
        double = copy.deepcopy(model).double()
        if "num_experts_per_tok" in self.settings:
            double.model.set_experts_implementation("eager")
        return InDouble(double)

    def arguments(self, size: int) -> tuple[torch.Tensor, ...]:
        """Return the arguments of the built model."""
        return tuple(self.inputs(size).values())


class InDouble(nn.Module):
    """A model in f64 whose casts to f32 are casts to f64, too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        with WidenedCasts():
            return self.model(*tensors)


class Called(nn.Module):
    """A model whose arguments are tensors in order, and whose result is a dictionary of tensors."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], row: Architecture) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.outputs, self.options = row.outputs, dict(row.options)

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        result = self.model(**dict(zip(self.names, tensors, strict=True)), **self.options)
        return {name: getattr(result, name) for name in self.outputs}


def _without_dropout(config: Any) -> None:
    """Set every probability of a dropout to 0, in nested configurations too."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif isinstance(value, transformers.PretrainedConfig):
            _without_dropout(value)


# -- inputs ----------------------------------------------------------------------------------------


def tokens(length: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return values(batch, length, dtype=torch.int64, low=3, high=VOCABULARY, seed=seed)


def text(size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(4 * size + 1)}


def masked_text(size: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 4 * size + 1, dtype=torch.int64)
    mask[0, 3 * size :] = 0
    return {**text(size), "attention_mask": mask}


def short_text(size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(size + 1)}


def long_text(size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(16 * size)}


def two_texts(size: int) -> dict[str, torch.Tensor]:
    return {**masked_text(size), "decoder_input_ids": tokens(3 * size, seed=1)}


def images(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": values(size + 1, 3, 32, 32)}  # a batch of 3 would be the channels


def captioned_images(size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(7, batch=size + 1), **images(size)}


def sound(size: int) -> dict[str, torch.Tensor]:
    return {"input_values": values(size, 400)}


def spectrum(size: int) -> dict[str, torch.Tensor]:
    return {
        "input_features": values(size, 16, 40),
        "decoder_input_ids": tokens(7, batch=size),
    }


# -- the table -------------------------------------------------------------------------------------

DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 12}
ENCODER = {name: value for name, value in DECODER.items() if name != "use_cache"}
VISION = {
    "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "num_labels": 7,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
TEXT_STATES = ("last_hidden_state",)


def _causal(name: str, config: str | None = None, **settings: Any) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{config or name}Config", text, settings)


def _masked(name: str, **settings: Any) -> Architecture:
    merged = {**ENCODER, **settings}
    return Architecture(f"{name}ForMaskedLM", f"{name}Config", masked_text, merged)


def _vision(name: str, **settings: Any) -> Architecture:
    return Architecture(f"{name}ForImageClassification", f"{name}Config", images, settings)


SMALL_BART = {
    "vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 100,
    "decoder_ffn_dim": 100, "max_position_embeddings": 128, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SMALL_T5 = {
    "vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "d_ff": 100, "num_layers": 2,
    "num_heads": 4, "use_cache": False, "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}  # fmt: skip
CLIP_TEXT = {**ENCODER, "projection_dim": 24}
CLIP_VISION = {**VISION, "projection_dim": 24}

ARCHITECTURES: dict[str, Architecture] = {
    # decoders of text
    "gpt2": Architecture(
        "GPT2LMHeadModel", "GPT2Config", text,
        {"n_layer": 2, "n_head": 4, "n_embd": 48, "n_positions": 128, "vocab_size": VOCABULARY,
         "use_cache": False, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "gptj": _causal("GPTJ", n_layer=2, n_head=4, n_embd=48, n_positions=128, rotary_dim=4,
                    vocab_size=VOCABULARY, use_cache=False),
    "gpt_neox": _causal("GPTNeoX", **DECODER),
    "opt": _causal("OPT", **DECODER, ffn_dim=100, word_embed_proj_dim=48),
    "bloom": _causal("Bloom", vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=4,
                     use_cache=False),
    "falcon": _causal("Falcon", **DECODER, new_decoder_architecture=False, multi_query=True),
    "mpt": _causal("Mpt", vocab_size=VOCABULARY, d_model=48, n_layers=2, n_heads=4,
                   max_seq_len=128, use_cache=False),
    "llama": _causal("Llama", **GROUPED),
    "mistral": _causal("Mistral", **GROUPED, sliding_window=6),
    "mixtral": _causal("Mixtral", **GROUPED, **EXPERTS, num_local_experts=4),
    "qwen2": _causal("Qwen2", **GROUPED),
    "qwen2_moe": _causal("Qwen2Moe", **GROUPED, **EXPERTS, num_experts=4,
                         moe_intermediate_size=40, shared_expert_intermediate_size=56),
    "qwen3": _causal("Qwen3", **GROUPED),
    "qwen3_next": _causal(
        "Qwen3Next", **GROUPED, layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[0, 1], linear_key_head_dim=12, linear_value_head_dim=12,
        linear_num_key_heads=2, linear_num_value_heads=4,
    ),
    "gemma2": _causal("Gemma2", **GROUPED, sliding_window=6, query_pre_attn_scalar=12),
    "gemma3": _causal("Gemma3", "Gemma3Text", **GROUPED, sliding_window=6,
                      query_pre_attn_scalar=12),
    "phi3": _causal("Phi3", **GROUPED),
    "olmo2": _causal("Olmo2", **GROUPED),
    "cohere": _causal("Cohere", **GROUPED),
    "gpt_oss": _causal("GptOss", **GROUPED, num_local_experts=4, num_experts_per_tok=2,
                       sliding_window=6),
    "deepseek_v3": _causal(
        "DeepseekV3", **{**DECODER, "num_key_value_heads": 4}, moe_intermediate_size=40,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=12, v_head_dim=12,
    ),
    "mamba": Architecture(
        "MambaForCausalLM", "MambaConfig", short_text,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2,
         "use_cache": False},
        dynamic_graphs=3,  # without its own kernels, a loop of Python's over tokens
    ),
    "rwkv": Architecture(
        "RwkvForCausalLM", "RwkvConfig", short_text,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "attention_hidden_size": 32,
         "num_hidden_layers": 2, "context_length": 64, "use_cache": False},
        dynamic_graphs=3,  # a loop of Python's own over tokens
    ),
    # encoders of text
    "bert": _masked("Bert"),
    "roberta": _masked("Roberta"),
    "electra": _masked("Electra", embedding_size=24),
    "albert": _masked("Albert", embedding_size=24),
    "distilbert": Architecture(
        "DistilBertForMaskedLM", "DistilBertConfig", masked_text,
        {"vocab_size": VOCABULARY, "dim": 48, "hidden_dim": 100, "n_layers": 2, "n_heads": 4,
         "max_position_embeddings": 128},
    ),
    "deberta_v2": _masked("DebertaV2", relative_attention=True, position_buckets=8,
                          pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm",
                          share_att_key=True),
    "longformer": Architecture(
        "LongformerForMaskedLM", "LongformerConfig", long_text,
        {**ENCODER, "attention_window": [8, 8]},
        graphs=4,  # it asks with .item() whether attention is global
        dynamic_graphs=30,  # 26 in training
    ),
    "big_bird": Architecture(
        "BigBirdForMaskedLM", "BigBirdConfig", long_text,
        {**ENCODER, "attention_type": "original_full"},
    ),
    "fnet": Architecture(
        "FNetForMaskedLM", "FNetConfig", text,
        {name: v for name, v in ENCODER.items() if name != "num_attention_heads"},
    ),
    "xlnet": Architecture(
        "XLNetLMHeadModel", "XLNetConfig", text,
        {"vocab_size": VOCABULARY, "d_model": 48, "n_layer": 2, "n_head": 4, "d_inner": 100},
    ),
    # encoders and decoders of text
    "t5": Architecture("T5ForConditionalGeneration", "T5Config", two_texts, SMALL_T5),
    "bart": Architecture("BartForConditionalGeneration", "BartConfig", two_texts, SMALL_BART),
    # images
    "vit": _vision("ViT", **VISION),
    "dinov2": _vision("Dinov2", **VISION),
    "beit": _vision("Beit", **VISION, use_relative_position_bias=True),
    "swin": _vision("Swin", image_size=32, patch_size=4, embed_dim=24, depths=[2, 1],
                    num_heads=[2, 4], window_size=4, num_labels=7),
    "convnext": _vision("ConvNext", hidden_sizes=[16, 24], depths=[1, 2], num_stages=2,
                        num_labels=7, layer_scale_init_value=0.5),
    "resnet": _vision("ResNet", embedding_size=12, hidden_sizes=[16, 24], depths=[1, 2],
                      num_labels=7),
    "segformer": Architecture(
        "SegformerForSemanticSegmentation", "SegformerConfig", images,
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 24],
         "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
         "mlp_ratios": [2, 2], "decoder_hidden_size": 24, "num_labels": 7},
        graphs=2,  # it calls a function of warnings, which takes a lock
        dynamic_graphs=2,
    ),
    "yolos": Architecture(
        "YolosForObjectDetection", "YolosConfig", images,
        {**VISION, "image_size": [32, 32], "num_detection_tokens": 5}, ("logits", "pred_boxes"),
    ),
    "sam": Architecture(
        "SamModel", "SamConfig", images,
        {"vision_config": {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
                           "num_pos_feats": 8, "mlp_dim": 60, "window_size": 2,
                           "global_attn_indexes": [1]},
         "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8,
                                   "mask_input_channels": 4},
         "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 30, "num_attention_heads": 2,
                                 "iou_head_hidden_dim": 16}},
        ("pred_masks", "iou_scores"),
    ),
    # images and text, sounds
    "clip": Architecture(
        "CLIPModel", "CLIPConfig", captioned_images,
        {"text_config": CLIP_TEXT, "vision_config": CLIP_VISION, "projection_dim": 24},
        ("logits_per_image", "text_embeds", "image_embeds"),
    ),
    "siglip": Architecture(
        "SiglipModel", "SiglipConfig", captioned_images,
        {"text_config": {**ENCODER, "max_position_embeddings": 16}, "vision_config": VISION},
        ("logits_per_image",),
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration", "WhisperConfig", spectrum,
        {**SMALL_BART, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32},
    ),
    "wav2vec2": Architecture(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", sound,
        {**ENCODER, "conv_dim": (24, 24), "conv_stride": (5, 2), "conv_kernel": (10, 3),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
         "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False},
        training=False,  # it would ask that its input, which requires a gradient, do so
    ),
}  # fmt: skip
"""By the name of the architecture."""
