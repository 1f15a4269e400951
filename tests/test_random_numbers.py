"""Tests draw the same random numbers whatever ran before them, which differs from run to run."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture
def drawn() -> torch.Tensor:
    return torch.rand(4)


@pytest.mark.parametrize("again", (False, True))
def test_a_test_and_its_fixtures_draw_from_the_seed_of_the_run(
    drawn: torch.Tensor, again: bool, request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--seed")
    generator = torch.Generator().manual_seed(seed)
    for numbers in (drawn, torch.rand(4)):
        assert torch.equal(numbers, torch.rand(4, generator=generator))
    assert random.random() == random.Random(seed).random()
