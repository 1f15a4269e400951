"""Where steps end: with an optimizer's, or where the graph that was first called is again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fusec.tools.clock import Clock, Lap
from fusec.tools.report.profile import OPTIMIZER, Steps


def lap_of(seconds: float, *, compiled: bool = False) -> Lap:
    return Lap(seconds, {("forward 0/0", ""): (1, seconds / 2), OPTIMIZER: (1, 1.0)}, compiled)


def steps_with(laps: Sequence[Lap]) -> Steps:
    steps = Steps(Clock())
    for lap in laps:
        steps._clock.lap = lambda lap=lap: lap  # type: ignore[method-assign, misc]
        steps.end()
    return steps


def test_steps_that_compile_or_warm_up_do_not_count() -> None:
    laps = [lap_of(n, compiled=n in (1, 5)) for n in range(1, 8)]
    assert [lap.seconds for lap in steps_with(laps).laps] == [4, 6, 7]


def test_a_script_s_steps_end_with_its_first_optimizer_s() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=0.1) for weight in weights)
    clock = Clock()
    steps = Steps(clock)
    with steps.found_in_a_script():
        for _ in range(5):
            clock.at_graph("forward 0/0")
            first.step()
            second.step()
    assert len(steps.laps) == 4  # behind those that warm up and the graph that was called first
    assert steps.laps[-1].spent[OPTIMIZER][0] == 2
    first.step()
    assert len(steps.laps) == 4


def test_without_an_optimizer_steps_begin_with_the_graph_that_was_called_first() -> None:
    clock = Clock()
    steps = Steps(clock)
    with steps.found_in_a_script():
        for number in range(5):
            clock.at_graph(f"inference 0/{number}")
            clock.at_graph("inference 1/0")
    assert len(steps.laps) == 3
