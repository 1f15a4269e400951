"""Greedy decoding with a cache of keys and values: eager's tokens, and no cache that is copied."""

from __future__ import annotations

import pytest
import torch

from fusec.driver.compiler import RECENT
from tests.models.zoo import LANGUAGE_MODELS, VOCABULARY, transformers
from tests.support import values

STEPS = 8


def decode(forward, ids, cache):
    """Return the tokens that follow, each the most likely one."""
    tokens, position = [ids], torch.arange(ids.shape[1])
    with torch.no_grad():
        for _ in range(STEPS):
            made = forward(
                input_ids=tokens[-1],
                past_key_values=cache,
                use_cache=True,
                cache_position=position,
            )
            tokens.append(made.logits[:, -1:].argmax(-1))
            position = position[-1:] + 1
    return torch.cat(tokens[1:], 1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2", "dynamic"),
        pytest.param("llama", "static", marks=pytest.mark.slow),
        pytest.param("gpt2", "static", marks=pytest.mark.slow),
        pytest.param("llama", "dynamic", marks=pytest.mark.slow),
    ],
)
def test_decoding_with_a_cache_gives_eagers_tokens(name, kind):
    torch._dynamo.reset()
    RECENT.clear()
    model = LANGUAGE_MODELS[name](layers=1).model
    ids = values(2, 5, dtype=torch.int64, low=1, high=VOCABULARY)

    def cache():
        if kind == "dynamic":
            return transformers.DynamicCache(config=model.config)
        return transformers.StaticCache(config=model.config, max_cache_len=32)

    compiled = torch.compile(model.forward, backend="fusec", options={"strict": True})
    assert torch.equal(decode(compiled, ids, cache()), decode(model.forward, ids, cache()))
    assert [trace.problem for trace in RECENT] == [None] * len(RECENT)
    # Prefill, one step; a cache that grows is seen to be dynamic at the second.
    assert len(RECENT) == (2 if kind == "static" else 3)
