"""Clocks of peers with threads of their own, and programs beside them."""

from __future__ import annotations

import hashlib
import os
import threading

import pytest

from bench import busy, timing


def test_programs_beside_run_until_the_block_ends() -> None:
    with busy.beside(2) as programs:
        assert [os.waitpid(pid, os.WNOHANG) for pid in programs] == [(0, 0)] * 2
    for pid in programs:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_settled_is_a_process_whose_threads_rest() -> None:
    done = threading.Event()

    def spin() -> None:
        hashlib.sha256(bytes(1 << 26))  # without Python's lock, as threads of libraries
        done.set()

    threading.Thread(target=spin).start()
    timing.settle(limit=60.0)
    assert done.is_set()


def test_a_sample_apart_begins_with_a_call_that_is_not_timed() -> None:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in "ab"}
    samples = timing.interleaved(steps, rounds=2, budget=10.0, at_least=0.0, apart=True)
    assert {name: len(values) for name, values in samples.items()} == {"a": 2, "b": 2}
    assert "".join(calls[6:]) == "aabbbbaa"  # six warm-up calls first


def test_samples_are_counted_by_the_clock_that_is_given() -> None:
    now = [0.0]

    def step() -> None:
        now[0] += 2.0

    given = {"rounds": 1, "budget": 1.0, "at_least": 0.0, "clock": lambda: now[0]}
    assert timing.interleaved({"a": step}, **given) == {"a": [2.0]}
