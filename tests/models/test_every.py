"""Small models of what transformers lists, and how they are judged."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tests.models import every

ONES = torch.ones(4)


def test_each_pair_is_listed_once_and_in_the_same_order() -> None:
    listed = every.names()
    assert len(set(listed)) == len(listed) > 100 and listed == every.names()


def test_a_decoder_is_small_and_runs() -> None:
    row = every.small("CAUSAL_LM", "llama")
    model = row.build()
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert model(*row.arguments(3))["logits"].isfinite().all()


def test_what_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every, "MOST_PARAMETERS", 1)
    with pytest.raises(every.NotBuiltError, match="million parameters"):
        every.small("CAUSAL_LM", "llama")


@pytest.mark.parametrize(
    ("eager", "compiled", "exact"),
    [
        (ONES, ONES * 1.01, ONES),
        (ONES, ONES / 0, ONES),
        (ONES / 0, ONES, ONES),
        (ONES, ONES * float("nan"), ONES),
        (ONES, ONES[:3], ONES),
        (ONES, None, ONES),
        (None, ONES, None),
    ],
)
def test_what_is_off_is_found(eager, compiled, exact) -> None:
    with pytest.raises(AssertionError):
        every._assert_as_exact("x", eager, compiled, exact, 0.0)


@pytest.mark.parametrize(
    ("eager", "compiled", "exact"),
    [
        (ONES * 1.01, ONES * 1.02, ONES),
        (ONES / 0, ONES / 0, ONES),
        (None, ONES * 0, None),
        (None, None, None),
    ],
)
def test_a_few_times_eagers_error_is_none(eager, compiled, exact) -> None:
    every._assert_as_exact("x", eager, compiled, exact, 0.0)
