"""The clock: what graphs call is counted and timed while somebody watches, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusec.runtime.clock import Clock, clock_running, current_clock

CPU = torch.device("cpu")


def test_there_is_a_clock_only_while_somebody_watches() -> None:
    assert current_clock() is None
    with clock_running() as outer:
        with clock_running() as inner:
            assert current_clock() is inner
        assert current_clock() is outer
    assert current_clock() is None


def test_an_operator_s_calls_are_told_apart_by_their_position() -> None:
    clock = Clock()
    graph = clock.of_graph("forward 0/0", CPU)
    mm = graph.operator("mm", lambda x: x + 1)
    k0 = graph.kernel("k0", lambda: None)

    def wrapper(args: list[Any]) -> Any:
        k0()
        return mm(mm(args[0]))

    call: Callable[[list[Any]], Any] = graph.graph(wrapper)
    assert [call([n]) for n in range(3)] == [2, 3, 4]
    totals = clock.totals("forward 0/0")
    assert {name: calls for name, (calls, _) in totals.items()} == {
        "": 3,
        "k0": 3,
        "mm #0": 3,
        "mm #1": 3,
    }
    assert totals[""][1] >= totals["mm #0"][1] + totals["mm #1"][1] > 0


def test_threads_that_share_a_graph_do_not_fail() -> None:
    graph = Clock().of_graph("forward 0/0", CPU)
    mm = graph.operator("mm", lambda x: x + 1)
    graph._position["mm"] = 2  # another thread is at its third call, and nothing is made yet
    assert mm(1) == 2


def test_a_call_that_raises_is_counted_and_raises() -> None:
    clock = Clock()

    def fail() -> None:
        raise ValueError

    call = clock.of_graph("g", CPU).kernel("k0", fail)
    with pytest.raises(ValueError):
        call()
    assert clock.totals("g")["k0"][0] == 1
    assert clock.totals("another") == {}
