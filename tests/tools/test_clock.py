"""The clock: what graphs call is counted and timed while somebody watches, and only then."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fusec.driver.observers import OBSERVERS
from fusec.tools.clock import COLLECTION, Clock, clock_running

CPU = torch.device("cpu")


def test_there_is_a_clock_only_while_somebody_watches() -> None:
    before = list(OBSERVERS)
    with clock_running() as outer:
        with clock_running() as inner:
            assert [*before, outer, inner] == OBSERVERS
        assert [*before, outer] == OBSERVERS
    assert before == OBSERVERS


def test_launches_are_timed_by_their_names() -> None:
    clock = Clock()
    graph = clock.hooks("forward 0/0", CPU)

    k0, mm, mm_1 = (graph.launch(name, add) for name in ("k0", "mm", "mm_1"))

    def wrapper(args: list[Any]) -> Any:
        k0(0)
        return mm_1(mm(args[0]), 1)

    call: Callable[[list[Any]], Any] = graph.call(wrapper)
    assert [call([n]) for n in range(3)] == [2, 3, 4]
    totals = clock.totals("forward 0/0")
    assert {name: calls for name, (calls, _) in totals.items()} == {
        "": 3,
        "k0": 3,
        "mm": 3,
        "mm_1": 3,
    }
    assert totals[""][1] >= totals["mm"][1] + totals["mm_1"][1] > 0


def add(x: int, by: int = 1) -> int:
    return x + by


def test_a_lap_is_what_was_spent_since_the_last() -> None:
    clock = Clock()
    begun: list[str] = []
    clock.at_graph = begun.append
    graph = clock.hooks("forward 0/0", CPU)
    call = graph.call(lambda args: graph.launch("k0", add)(args[0]))
    call([1])
    first = clock.lap()
    assert first.compiled and first.spent[("forward 0/0", "k0")][0] == 1
    assert first.seconds >= first.spent[("forward 0/0", "")][1]
    call([1])
    call([2])
    clock.hooks("backward 0/0", CPU)
    second = clock.lap()
    assert second.compiled and second.spent[("forward 0/0", "k0")][0] == 2
    assert clock.lap().spent == {}
    assert not clock.lap().compiled
    assert begun == ["forward 0/0"] * 3


def test_a_call_that_raises_is_counted_and_raises() -> None:
    clock = Clock()

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        clock.hooks("g", CPU).launch("k0", fail)()
    assert clock.totals("g")["k0"][0] == 1
    assert clock.totals("another") == {}


@pytest.mark.parametrize("name", ["k0", "mm"])
def test_a_collection_of_garbage_is_no_launch_s(name: str) -> None:
    def slow(phase: str, info: dict[str, int]) -> None:
        time.sleep(0.05 if phase == "start" else 0.0)

    begun = time.perf_counter()
    with clock_running() as clock:
        gc.callbacks.append(slow)  # behind the clock's own: within what that times
        try:
            graph = clock.hooks("forward 0/0", CPU)
            graph.call(lambda args: graph.launch(name, gc.collect)())([])
        finally:
            gc.callbacks.remove(slow)
    wall = time.perf_counter() - begun
    totals = clock.totals("forward 0/0")
    assert 0 <= totals[name][1] <= totals[""][1] <= wall - clock.collected.seconds
    assert clock.lap().spent[COLLECTION][0] >= 1
    assert clock.collected.seconds >= 0.05
    assert not [one for one in gc.callbacks if getattr(one, "__self__", None) is clock]


def test_a_collection_of_garbage_in_a_compile_is_part_of_the_compile() -> None:
    def collecting(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        gc.collect()
        return gm.forward

    torch._dynamo.reset()
    gc.disable()
    try:
        with clock_running() as clock:
            torch.compile(lambda x: x + 1, backend=collecting)(torch.ones(2))
            assert clock.collected.calls == 0
            gc.collect()
            assert clock.collected.calls == 1
    finally:
        gc.enable()
