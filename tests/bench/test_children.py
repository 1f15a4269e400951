"""Tasks in child processes: each way in which one can end costs that task alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from bench.children import Task, work_through

MANY_S = 120.0


def obey(name: str, report: Callable[[Any], None]) -> str:
    """Do what a task's name says: die, hang, raise, report, or return it."""
    match name:
        case "dies":
            os._exit(7)
        case "hangs":
            time.sleep(MANY_S)
        case "raises":
            raise MemoryError("no memory was left")
        case "reports":
            report("half of it")
    return f"{name}, in {os.getpid()}"


def ends(names: list[str], *, children: int = 1, limit_s: float = MANY_S) -> dict[str, tuple]:
    """Return how each task ended, and its value without the process that it ran in."""
    tasks = [Task(name, 0.0, 1.0 if name == "hangs" else limit_s) for name in names]
    deadline = time.monotonic() + MANY_S
    found = work_through(obey, tasks, children=children, deadline=deadline)
    last = {event.task: event for event in found if event.kind != "begun"}
    return {name: (e.kind, str(e.value).partition(", in ")[0]) for name, e in last.items()}


def test_a_task_that_ends_its_process_costs_no_other():
    assert ends(["good", "dies", "hangs", "raises", "last"]) == {
        "good": ("done", "good"),
        "dies": ("failed", "its process ended with 7"),
        "hangs": ("failed", "given up: no end after 1 s, or of all time"),
        "raises": ("failed", "MemoryError: no memory was left"),
        "last": ("done", "last"),
    }


def test_a_child_does_one_task_after_the_other_and_several_work_at_a_time():
    tasks = [Task(name, 0.0, MANY_S) for name in "abc"]
    deadline = time.monotonic() + MANY_S
    events = list(work_through(obey, tasks, children=1, deadline=deadline))
    assert [e.kind for e in events] == ["begun", "done"] * 3
    assert len({e.value.partition(", in ")[2] for e in events if e.kind == "done"}) == 1
    assert ends(list("abcd"), children=3) == {name: ("done", name) for name in "abcd"}


def test_what_a_task_reports_comes_before_its_end():
    deadline = time.monotonic() + MANY_S
    events = work_through(obey, [Task("reports", 0.0, MANY_S)], children=2, deadline=deadline)
    assert [event.kind for event in events] == ["begun", "progress", "done"]


def test_a_task_for_which_no_time_is_left_is_not_begun():
    tasks = [Task("long", 100.0, 1.0), Task("short", 0.0, 60.0)]
    events = work_through(obey, tasks, children=1, deadline=time.monotonic() + 50)
    assert [(e.task, e.kind) for e in events] == [
        ("long", "left out"), ("short", "begun"), ("short", "done"),
    ]  # fmt: skip
