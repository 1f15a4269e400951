"""Language models of transformers, from configurations, and a step of decoding."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bench.workload import Workload
from bench.workloads.deployed.model import Output, measured, tokens
from bench.workloads.models import Decoder

VOCABULARY = 16000
Made = tuple[nn.Module, tuple[Tensor, ...]]


def gpt2(shrink: int, *, layers: int, width: int, vocabulary: int, batch: int, length: int) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel  # local: it takes a second

    layers, vocabulary = max(1, layers // shrink), vocabulary // shrink
    config = GPT2Config(
        n_layer=layers, n_embd=width // shrink // 8 * 8, n_head=width // 64, vocab_size=vocabulary,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = Output(GPT2LMHeadModel(config), ("input_ids",), "logits")
    return model, (tokens(batch, max(8, length // shrink), vocabulary),)


def llama(shrink: int, *, length: int, attention: str) -> Made:
    """Four layers of width 512; ``attention``: "sdpa", or "eager", which writes it out."""
    from transformers import LlamaConfig, LlamaForCausalLM  # local: it takes a second

    width, vocabulary = 512 // shrink, VOCABULARY // shrink
    config = LlamaConfig(
        hidden_size=width, intermediate_size=1408 // shrink, num_hidden_layers=max(1, 4 // shrink),
        num_attention_heads=8, num_key_value_heads=2, vocab_size=vocabulary, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    model = Output(LlamaForCausalLM(config), ("input_ids",), "logits")
    return model, (tokens(2, max(8, length // shrink), vocabulary),)


def bert(shrink: int) -> Made:
    """Four layers of width 384, whose states are the result, with a mask of padding."""
    from transformers import BertConfig, BertModel  # local: it takes a second

    width, vocabulary, length = 384 // shrink // 6 * 6, VOCABULARY // shrink, 128 // shrink
    config = BertConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=max(1, 4 // shrink),
        num_attention_heads=6, vocab_size=vocabulary, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    names = ("input_ids", "attention_mask")
    model = Output(BertModel(config, add_pooling_layer=False), names, "last_hidden_state")
    mask = torch.ones(8, length, dtype=torch.int64)
    mask[::2, length * 3 // 4 :] = 0
    return model, (tokens(8, length, vocabulary), mask)


def t5(shrink: int) -> Made:
    """T5-small: a text of 128 tokens, and 64 that are decoded at once, as in training."""
    from transformers import T5Config, T5ForConditionalGeneration  # local: it takes a second

    config = T5Config(
        num_layers=max(1, 6 // shrink), d_model=512 // shrink, d_ff=2048 // shrink,
        d_kv=64 // shrink, vocab_size=32128 // shrink, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    names = ("input_ids", "decoder_input_ids")
    model = Output(T5ForConditionalGeneration(config), names, "logits")
    source, target = (tokens(1, n // shrink, config.vocab_size) for n in (128, 64))
    return model, (source, target)


def decoding(shrink: int) -> Made:
    """A token through four layers of width 1024, 512 tokens behind it."""
    width = 1024 // shrink // 64 * 64
    return Decoder(4, width, 512 // shrink, 1), (torch.randn(1, 1, width),)


def rows() -> list[Workload]:
    small = {"layers": 6, "width": 512, "vocabulary": VOCABULARY, "batch": 2, "length": 256}
    large = {"layers": 12, "width": 768, "vocabulary": 50257, "batch": 1, "length": 128}
    core = {
        "gpt2 124M 1x128": partial(gpt2, **large),
        "gpt2 6x512 2x256": partial(gpt2, **small),
        "llama 4x512 2x256": partial(llama, length=256, attention="sdpa"),
        "llama 4x512, attention written out 2x512": partial(llama, length=512, attention="eager"),
        "bert 4x384 8x128": bert,
    }
    return [
        *(w for name, make in core.items() for w in measured("core", name, make)),
        *measured("further", "t5-small 1x128+64", t5),
        *measured("further", "llama decoding step 4x1024", decoding, trained=False),
    ]
