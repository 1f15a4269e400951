"""The stopwatch: how often it calls, on what, and what it reads; nothing here depends on speed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fusec.errors import InternalError
from fusec.runtime.race import stopwatch as module
from fusec.runtime.race.stopwatch import cpu_cache, sets_of_inputs, stopwatch

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sample_calls_once_for_each_set_and_leaves_the_sets(threads: int) -> None:
    """With one thread its own time counts, in which a call that sleeps does nothing."""
    sets: list[list[Any]] = [[1], [2], [3]]
    seen = []

    def call(inputs: list[Any]) -> None:
        seen.extend(inputs)
        inputs.clear()
        time.sleep(0.02)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        us = stopwatch(CPU)(call, sets)
    finally:
        torch.set_num_threads(before)
    assert us >= 2e4 if threads == 2 else us < 1e4
    assert seen == [1, 2, 3]
    assert sets == [[1], [2], [3]]


def test_no_stopwatch_for_an_unknown_device() -> None:
    with pytest.raises(InternalError, match="nothing is timed on device 'meta'"):
        stopwatch(torch.device("meta"))


@pytest.mark.parametrize(
    ("kind", "nbytes", "sets"),
    [("cpu", 0, 8), ("cpu", 16 << 20, 4), ("cpu", 1 << 30, 1), ("cuda", 128 << 20, 4)],
)
def test_large_inputs_have_few_sets(kind: str, nbytes: int, sets: int) -> None:
    assert sets_of_inputs(torch.device(kind), nbytes) == sets


def test_the_largest_cache_counts_and_what_is_not_readable_does_not(tmp_path: Path) -> None:
    assert cpu_cache(tmp_path) == module.DEFAULT_CACHE
    for number, text in enumerate(["48K", "2M\n", "98304K", "", "big", "12"]):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(text)
    assert cpu_cache(tmp_path) == 96 << 20
