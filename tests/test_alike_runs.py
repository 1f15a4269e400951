"""What ran before a test differs from run to run: it decides nothing of what the test sees."""

from __future__ import annotations

import os
import platform
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fusec.runtime.kernels.background import Background


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


LEFT: list[Background[None]] = []


@pytest.mark.parametrize("again", (False, True))
def test_what_a_test_builds_in_the_background_ends_with_it(again: bool) -> None:
    assert not any(one._thread.is_alive() for one in LEFT)
    LEFT.append(Background(lambda: time.sleep(0.2)))


@pytest.mark.parametrize("again", (False, True))
def test_where_a_test_looks_for_modules_is_its_own(again: bool) -> None:
    assert "nowhere" not in sys.path
    sys.path.append("nowhere")


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ, reason="another allocator"
)
def test_new_memory_holds_no_results_that_were_freed() -> None:
    for size in (64, 1 << 12, 1 << 22):
        for _ in range(8):
            right = [torch.ones(size) for _ in range(3)]
            del right
            assert not (torch.empty(size) == 1).any()


def test_hypothesis_draws_the_same_examples_whatever_they_take() -> None:
    """By itself it draws others in each run, each of which is to take 200 ms at most."""
    for path in Path(__file__).parent.rglob("test_*.py"):
        for before, line in pairwise(path.read_text(encoding="utf-8").splitlines()):
            assert not line.startswith("@given(") or "BOUNDED" in before, f"{path.name}: {line}"
