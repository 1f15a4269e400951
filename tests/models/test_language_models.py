"""GPT-2, BERT, Llama and a model of the user's own against eager: logits, losses, gradients."""

from __future__ import annotations

import pytest
import torch

from tests.models.zoo import ATTENTIONS, LANGUAGE_MODELS, VOCABULARY, Loss, own_model
from tests.support import check, values

# Sums over dozens of contractions: `same`'s own default.
TOLERANCE = 1e-4


def tokens(*shape, low=1, seed=0):
    return values(*shape, dtype=torch.int64, low=low, high=VOCABULARY, seed=seed)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_logits_of_padded_batches_match_eager(name, attention):
    """Batches without padding are those of the losses."""
    ids = tokens(3, 17)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    mask[2, 4:] = 0
    check(LANGUAGE_MODELS[name](attention, layers=1), ids, mask, tol=TOLERANCE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("attention", ("sdpa", pytest.param("eager", marks=pytest.mark.slow)))
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_loss_and_gradients_of_all_parameters_match_eager(name, attention):
    model = Loss(LANGUAGE_MODELS[name](attention, layers=1), shift=name != "bert").train()
    check(model, tokens(2, 13), train=True, tol=TOLERANCE)


@pytest.mark.slow
def test_bfloat16_gpt2_matches_eager_within_the_rule_of_half_types():
    model = LANGUAGE_MODELS["gpt2"](layers=1).to(torch.bfloat16)
    check(model, tokens(2, 17), tol=2e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))
def test_a_pretrained_model_of_the_users_own_matches_eager(train):
    ids = tokens(3, 12, low=0)
    ids[1, 6:] = 0
    check(own_model(), ids, train=train, tol=TOLERANCE)
