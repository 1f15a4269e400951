"""What ran before a test, which differs from run to run, decides neither numbers nor memory."""

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


def test_new_memory_holds_no_results_that_were_freed() -> None:
    for size in (64, 1 << 12, 1 << 22):
        for _ in range(8):
            right = [torch.ones(size) for _ in range(3)]
            del right
            assert not (torch.empty(size) == 1).any()
