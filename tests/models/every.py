"""A small configuration of every architecture that transformers lists, from its default one.

Numbers whose names say what they are (``hidden_size``, ``num_layers``) are lowered where the
default is higher, in nested configurations, too. What cannot be built so is left out, with the
reason: it stays large, asks for numbers that fit each other in another way, or for a package.
`python -m tests.fuzz --parts architectures --seeds 350` compares all.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

from tests.models.architectures import (
    SIZES,
    Architecture,
    Inputs,
    images,
    masked_text,
    sound,
    text,
    two_texts,
)
from tests.models.zoo import VOCABULARY
from tests.support import Run, compile_with, run

TIMES_EAGER, TOLERANCE = 8.0, 1e-5
MOST_PARAMETERS = 30_000_000
"""A model that stays larger takes minutes of a CPU in f64."""


def long_sound(size: int) -> dict[str, torch.Tensor]:
    return {"input_values": sound(size)["input_values"].repeat(1, 10)}


def large_images(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": images(size)["pixel_values"].repeat(1, 1, 2, 2)}


TABLES: Mapping[str, tuple[str, Inputs]] = {
    "CAUSAL_LM": ("logits", text),
    "MASKED_LM": ("logits", masked_text),
    "SEQ_TO_SEQ_CAUSAL_LM": ("logits", two_texts),
    "IMAGE_CLASSIFICATION": ("logits", large_images),
    "SEMANTIC_SEGMENTATION": ("logits", large_images),
    "DEPTH_ESTIMATION": ("predicted_depth", large_images),
    "CTC": ("logits", long_sound),
}
"""Table of transformers -> the field of a result that is compared, and the arguments of a call."""

MOST: Mapping[int, tuple[str, ...]] = {
    2: (
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers",
        "decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_key_value_heads",
        "num_kv_heads", "n_kv_heads", "num_experts_per_tok", "moe_topk", "top_k",
    ),
    4: (
        "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads",
        "decoder_attention_heads", "num_experts", "n_routed_experts", "num_local_experts",
    ),
    8: ("qk_rope_head_dim", "rotary_dim"),
    16: ("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "attention_head_dim"),
    32: (
        "moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank",
    ),
    64: (
        "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size", "model_dim",
        "word_embed_proj_dim", "emb_dim", "attention_hidden_size", "decoder_hidden_size",
        "image_size",
    ),
    VOCABULARY: ("vocab_size",),
    128: (
        "intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim",
        "ffn_hidden_size", "hidden_dim", "d_inner", "max_position_embeddings", "n_positions",
        "max_seq_len", "max_source_positions", "max_target_positions", "n_ctx",
    ),
}  # fmt: skip
"""Most of what configurations call by these names."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
LESS: tuple[tuple[str, ...], ...] = (
    (), ("head_dim",), ("num_key_value_heads",), ("rotary_dim",), ("hidden_dim", "dim"),
)  # fmt: skip
"""What stays as it is, in one attempt after the other: where numbers have to fit each other."""


class NotBuiltError(Exception):
    """No small model of an architecture could be built, called or traced, whatever the backend."""


def check(row: Architecture) -> None:
    """Compare a model's call without gradients, and its training step, with eager and f64.

    Raises:
        AssertionError: if they differ, for two inputs: of one, a ReLU at its kink may.
        NotBuiltError: if eager differs from itself, or Dynamo cannot trace it.
    """
    for train in (False, True):
        first, other = (row.arguments(size) for size in SIZES[:2])
        try:
            _check_call(row, first, train)
        except AssertionError:
            # What is drawn for one size begins what is drawn for another.
            turned = (x.flip(-1) if x.is_floating_point() else x for x in other)
            _check_call(row, tuple(turned), train)


def _check_call(row: Architecture, args: tuple[Tensor, ...], train: bool) -> None:
    torch._dynamo.reset()
    model = row.build()
    eager = run(copy.deepcopy(model), args, train=train)
    if not _equal(eager, run(copy.deepcopy(model), args, train=train)):
        raise NotBuiltError("eager's results differ from call to call")
    own = copy.deepcopy(model)
    try:
        compiled = run(compile_with(own, fullgraph=False), args, train=train, state=own)
    except Exception as error:
        torch._dynamo.reset()
        try:
            run(torch.compile(copy.deepcopy(model), backend="eager"), args, train=train)
        except Exception as other:
            raise NotBuiltError(f"Dynamo: {type(other).__name__}") from error
        raise
    exact = _exact(row, model, args, train) or eager
    found = [g.abs().max().item() for _, g in eager.gradients if g is not None and g.numel()]
    step = torch.finfo(torch.float32).eps * max(found, default=0.0)
    for kind in ("outputs", "inputs", "gradients"):
        for triple in zip(*(getattr(r, kind) for r in (eager, compiled, exact)), strict=True):
            a, b, r = (tensor for _, tensor in triple)
            _assert_as_exact(f"{kind}, {triple[0][0]}", a, b, r, step * (kind == "gradients"))


def _assert_as_exact(
    name: str, eager: Tensor | None, compiled: Tensor | None, exact: Tensor | None, step: float
) -> None:
    """Assert that the largest error is at most a few times eager's, and a rounding step.

    Architectures with random weights may be far worse conditioned than those that people train.
    A parameter that eager does not reach may have a gradient of zeros, as AOTAutograd gives it.
    """
    if eager is None or compiled is None or exact is None:
        assert eager is None and (compiled is None or not compiled.any()), name
        return
    assert (eager.shape, eager.dtype) == (compiled.shape, compiled.dtype), name
    if not eager.numel():
        return
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(eager), kind(compiled)), f"{name}: {kind.__name__}"
    exact = torch.where(eager.isinf(), eager.double(), exact.double())  # f64 goes further
    errors = [(t.double() - exact.double()).nan_to_num().abs().max() for t in (eager, compiled)]
    largest = exact.double().nan_to_num().abs().max()
    allowed = TIMES_EAGER * errors[0] + TOLERANCE * largest + step
    assert errors[1] <= allowed, f"{name}: off by {errors[1]:.3g}, eager by {errors[0]:.3g}"


def _equal(one: Run, other: Run) -> bool:
    pairs = zip(one.outputs, other.outputs, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for (_, a), (_, b) in pairs)


def _exact(
    row: Architecture, model: nn.Module, args: tuple[torch.Tensor, ...], train: bool
) -> Run | None:
    """Return the run in f64, or None for a model that names a type itself."""
    try:
        return run(row.exact(model), args, train=train, dtype=torch.float64)
    except Exception:
        return None


def names() -> list[tuple[str, str]]:
    """Return all pairs of a table and a type of model, in an order that mixes the tables."""
    listed = [(table, kind) for table in TABLES for kind in _models(table)]
    known = [pair for pair in listed if pair[1] in configuration_auto.CONFIG_MAPPING]
    return sorted(known, key=lambda pair: zlib.crc32("/".join(pair).encode()))


def small(table: str, kind: str) -> Architecture:
    """Return the first attempt at an architecture that builds and runs.

    Raises:
        NotBuiltError: with the reason of the last attempt.
    """
    try:
        attempts = [*_attempts(table, kind)]
    except Exception as error:  # its default configuration is none that it allows
        raise NotBuiltError(f"{table} {kind}: {type(error).__name__}") from error
    said = ""
    for row in attempts:
        try:
            with torch.no_grad(), torch.device("meta"):
                number = sum(p.numel() for p in row.build().parameters())
            if number > MOST_PARAMETERS:
                said = f"{number / 1e6:.0f} million parameters"
                continue
            with torch.no_grad():
                row.build()(*row.arguments(3))
            return row
        except Exception as error:  # whatever a model says of its numbers
            said = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    raise NotBuiltError(f"{table} {kind}: {said}")


def _attempts(table: str, kind: str) -> Iterator[Architecture]:
    output, inputs = TABLES[table]
    config = configuration_auto.CONFIG_MAPPING[kind]
    settings = _lowered(config())
    if table == "CAUSAL_LM":
        settings["is_decoder"] = True
    row = Architecture(_models(table)[kind], config.__name__, inputs, settings, (output,))
    for less in LESS:
        yield replace(row, settings={k: v for k, v in settings.items() if k not in less})


def _lowered(config: Any) -> dict[str, Any]:
    """Return settings that make a configuration small, those of nested ones as dictionaries."""
    own = vars(config)
    settings: dict[str, Any] = {
        name: most
        for most, names_of in MOST.items()
        for name in names_of
        if _is_number(own.get(name)) and own[name] > most
    }
    special = {name for name in SPECIAL if _is_number(own.get(name)) and own[name] >= VOCABULARY}
    settings.update(dict.fromkeys(special, 1))
    if own.get("pad_token_id", 0) is None:
        settings["pad_token_id"] = 0
    if "use_cache" in own:
        settings["use_cache"] = False
    if isinstance(own.get("layer_types"), list):
        settings["layer_types"] = None  # for as many layers as there are
    for name, value in own.items():
        if isinstance(value, transformers.PretrainedConfig):
            settings[name] = {**_lowered(value), "model_type": value.model_type}
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _models(table: str) -> dict[str, str]:
    """Return type -> name of a class, the first of several."""
    named = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
    return {kind: name if isinstance(name, str) else name[0] for kind, name in named.items()}
