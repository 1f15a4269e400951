"""Tasks in child processes: a fault, a hang or a lack of memory costs the task that it befell.

A fault on a GPU loses the device's context for all of a process, and a hang never ends. So
`work_through` hands tasks to children, one at a time to each; a child that dies, raises, or takes
longer than its task may is replaced, and the task has failed with what was seen.

Worked example::

    for event in work_through(measure, [Task("relu", 60.0)], children=4, deadline=math.inf):
        print(event.task, event.kind, event.value)    # relu begun None; relu done {...}
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

START_S = 180.0
"""Seconds for a child to import torch, on a machine that has not read it from its disk before."""

Work: TypeAlias = Callable[[str, Callable[[Any], None]], Any]
"""Does a task by its name, and may report what is known of it so far; importable by its name."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task's name, the seconds that it usually takes, and those after which it is given up."""

    name: str
    usual_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """What became of a task: its result, what is known so far, or in words why it has none."""

    task: str
    kind: Literal["begun", "progress", "done", "failed", "left out"]
    value: Any = None


def work_through(
    work: Work, tasks: Sequence[Task], *, children: int, deadline: float
) -> Iterator[Event]:
    """Yield what becomes of each task as it happens, in the order of its happening.

    Args:
        children: processes at a time.
        deadline: on the monotonic clock; a task that usually takes longer than what is left is not
            begun, and one that runs then is given up.
    """
    waiting, events = deque(tasks), queue.SimpleQueue[Event | None]()
    lines = [_Line(work, waiting, events, deadline) for _ in range(min(children, len(tasks)))]
    for line in lines:
        line.start()
    running = len(lines)
    while running:
        event = events.get()
        if event is None:
            running -= 1
        else:
            yield event


class _Line(threading.Thread):
    """Gives the next task to its child until none is left."""

    def __init__(
        self, work: Work, waiting: deque[Task], events: queue.SimpleQueue[Any], deadline: float
    ) -> None:
        super().__init__(daemon=True)
        self.work, self.waiting, self.events, self.deadline = work, waiting, events, deadline
        self.child: _Child | None = None

    def run(self) -> None:
        try:
            while task := self._next():
                kind, value = self._one(task)
                self.events.put(Event(task.name, kind, value))
        finally:
            if self.child is not None:
                self.child.end()
            self.events.put(None)

    def _next(self) -> Task | None:
        while True:
            try:
                task = self.waiting.popleft()
            except IndexError:
                return None
            if time.monotonic() + task.usual_s <= self.deadline:
                return task
            self.events.put(Event(task.name, "left out"))

    def _one(self, task: Task) -> tuple[Any, Any]:
        """Have a task done; return how it ended, and its value."""
        try:
            if self.child is None:
                self.child = _Child(self.work)
                self.child.receive(min(time.monotonic() + START_S, self.deadline))
            self.events.put(Event(task.name, "begun"))
            self.child.pipe.send(task.name)
            until = min(time.monotonic() + task.limit_s, self.deadline)
            while True:
                kind, value = self.child.receive(until)
                if kind != "progress":
                    break
                self.events.put(Event(task.name, kind, value))
        except TimeoutError:
            kind, value = "failed", f"given up: no end after {task.limit_s:.0f} s, or of all time"
        except (EOFError, OSError):
            assert self.child is not None
            self.child.process.join(10.0)
            kind, value = "failed", f"its process ended with {self.child.process.exitcode}"
        if kind == "failed" and self.child is not None:
            self.child.end()
            self.child = None
        return kind, value


class _Child:
    """A process that does tasks until one of them fails."""

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, until: float) -> tuple[Any, Any]:
        """Return the child's next message.

        Raises:
            TimeoutError: if there is none until then.
            EOFError: if the child is gone.
        """
        if not self.pipe.poll(max(until - time.monotonic(), 0.0)):
            raise TimeoutError
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, work: Work) -> None:
    """Do tasks as they come; end after an error, for it may have lost the device's context."""
    pipe.send(("ready", None))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            value = work(task, lambda known: pipe.send(("progress", known)))
        except Exception as error:
            pipe.send(("failed", f"{type(error).__name__}: {str(error)[:300]}"))
            return
        pipe.send(("done", value))
