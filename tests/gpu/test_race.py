"""The race on a CUDA device: events, flushed caches, and a way that fails at launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.runtime.autotune import Way, race
from fusec.runtime.stopwatch import stopwatch

pytestmark = pytest.mark.gpu


def square(inputs: list[Any]) -> list[Tensor]:
    return [inputs[0] @ inputs[0]]


def square_after_more_work(inputs: list[Any]) -> list[Tensor]:
    for _ in range(3):
        inputs[0] @ inputs[0]
    return square(inputs)


def wrong(inputs: list[Any]) -> list[Tensor]:
    return [inputs[0] @ inputs[0] + 1]


def out_of_memory(inputs: list[Any]) -> list[Tensor]:
    return [torch.empty(1 << 50, device=inputs[0].device)]


def test_the_device_decides() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def make_inputs() -> list[Any]:
        return [torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)]

    state = torch.cuda.get_rng_state(device)
    verdict = race(
        [
            Way("library", lambda: square_after_more_work),
            Way("fused", lambda: square),
            Way("wrong", lambda: wrong),
            Way("large", lambda: out_of_memory),
        ],
        make_inputs,
        reference="library",
        budget_s=60.0,
        device=device,
        expected=lambda inputs: [inputs[0].double() @ inputs[0].double()],
    )
    dropped = {lap.name: lap.dropped or "" for lap in verdict.laps}
    assert verdict.winner == "fused"  # a fourth of the work
    assert dropped["wrong"].startswith("wrong: output 0")
    assert dropped["large"].startswith("failed to run: OutOfMemoryError")
    assert torch.equal(torch.cuda.get_rng_state(device), state)


def test_times_are_those_of_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    sets = [[torch.randn(1 << 20, device=device)] for _ in range(4)]
    timer = stopwatch(device)
    for _ in range(5):
        assert 0.0 < timer(lambda inputs: inputs[0] + 1, sets) < 1e5
