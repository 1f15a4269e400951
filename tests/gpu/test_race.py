"""The race on a CUDA device: events, flushed caches, a way that fails at launch, whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.workload import backend_of
from fusec.runtime.race.autotune import Candidate, race
from fusec.runtime.race.stopwatch import stopwatch
from fusec.runtime.race.verdicts import Verdict
from tests.calls import calls_of

pytestmark = pytest.mark.gpu


def square(inputs: list[Any]) -> list[Tensor]:
    return [inputs[0] @ inputs[0]]


def square_after_more_work(inputs: list[Any]) -> list[Tensor]:
    for _ in range(3):
        inputs[0] @ inputs[0]
    return square(inputs)


def wrong(inputs: list[Any]) -> list[Tensor]:
    return [inputs[0] @ inputs[0] * 2]


def out_of_memory(inputs: list[Any]) -> list[Tensor]:
    return [torch.empty(1 << 50, device=inputs[0].device)]


def test_the_device_decides() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def make_inputs() -> list[Any]:
        return [torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)]

    state = torch.cuda.get_rng_state(device)
    verdict = race(
        [
            Candidate("library", lambda: square_after_more_work),
            Candidate("fused", lambda: square),
            Candidate("wrong", lambda: wrong),
            Candidate("large", lambda: out_of_memory),
        ],
        make_inputs,
        reference="library",
        budget_s=60.0,
        device=device,
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


def mlp(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[-2], device=q.device)
    scores = (q @ k.mT) * 0.125
    return scores.masked_fill(place[:, None] < place, float("-inf")).softmax(-1) @ v


def of_computed(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """A product of what its kernel computes: no sum may wait for the next iteration's operand."""
    return F.linear(F.gelu(x), w) + y


COMPUTED = ((8192, 1600), (1600, 1600), (8192, 1600))
MLP = ((512, 256), (768, 256), (768,))
HEADS = ((2, 4, 256, 64),) * 3
RACES = [(mlp, MLP, 60.0), (mlp, MLP, 130.0), (attention, HEADS, 60.0), (attention, HEADS, 130.0)]
RACES += [(of_computed, COMPUTED, 60.0)]
NAMES = ("mlp", "all", "attention", "all", "computed")


@pytest.mark.parametrize(("fn", "shapes", "budget"), RACES, ids=NAMES)
def test_no_configuration_computes_anything_wrong(
    fn: Callable[..., Tensor],
    shapes: tuple[tuple[int, ...], ...],
    budget: float,  # above ``RaceTuning.long_s`` every configuration is tried
) -> None:
    torch._dynamo.reset()
    inputs = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]
    options = {"strict": True, "cache": False, "race_budget_s": budget}
    compiled = torch.compile(fn, backend=backend_of("fusec"), options=options)
    with calls_of(race) as races:
        out = compiled(*inputs)
        out.sum().backward()
    verdicts: list[Verdict] = [call.result for call in races]
    torch.testing.assert_close(out, fn(*inputs), rtol=2e-2, atol=2e-2)
    assert verdicts
    for verdict in verdicts:
        print(verdict)
        assert not any((lap.dropped or "").startswith("wrong") for lap in verdict.laps), verdict
        assert any(lap.us is not None for lap in verdict.laps if lap.name != "library"), verdict
