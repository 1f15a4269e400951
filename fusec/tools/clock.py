"""Measure the seconds of kernels, eager kernels and whole graphs while a program runs.

A clock is an observer: the statements of a graph that is compiled while it runs are interpreted,
with the clock as a hook around each launch. On a CPU the clock is read around each launch. On a
GPU, where launches return at once, a pair of events is recorded around each of the first ones, and
the others count as their mean. Where the device waits for the host, such a pair includes the host's
time.

Python may collect garbage at any allocation, so in the midst of any launch. That time is subtracted
from the launch and has a name of its own, ``COLLECTION``. Collections during a compile count as
part of it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fusec.driver.launches import graph_id
from fusec.driver.observers import Observer, observing
from fusec.frontend.capture import main_device
from fusec.options import Options
from fusec.runtime.calls.executable import BoxedCall, CallHooks
from fusec.runtime.interior import is_compiling
from fusec.torch_interior import tensors_in

_COSTED = 200
"""Empty launches that ``cost_us`` times."""
_TIMED_CALLS = 200
"""On a GPU: calls of one kernel that are timed by events."""


COLLECTION = ("", "gc")
"""The key of Python's garbage collections in ``Clock.spent``."""


@dataclass(slots=True)
class Spent:
    """Calls of one launch, and the seconds that ``timed`` of them took."""

    calls: int = 0
    timed: int = 0
    seconds: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def total(self) -> float:
        """Return the seconds of all calls, scaled up from the timed ones; waits for events."""
        for start, end in self.events:
            end.synchronize()
            self.seconds += start.elapsed_time(end) / 1e3
        self.timed += len(self.events)
        self.events.clear()
        return self.seconds * self.calls / self.timed if self.timed else 0.0


@dataclass(frozen=True, slots=True)
class Lap:
    """Times between two readings of a clock.

    Attributes:
        seconds: wall time.
        spent: (graph, launch) -> calls and their seconds; the launch "" is the whole graph.
        compiled: whether graphs were compiled meanwhile.
    """

    seconds: float
    spent: Mapping[tuple[str, str], tuple[int, float]]
    compiled: bool = False


class Clock(Observer):
    """Times by graph and by the name of the launch; the launch "" is the whole graph.

    Attributes:
        at_graph: called with a graph's name when the graph begins to run.
    """

    def __init__(self) -> None:
        self.collected = Spent()
        self.spent: dict[tuple[str, str], Spent] = {COLLECTION: self.collected}
        self.at_graph: Callable[[str], object] = lambda graph: None
        self._devices: list[str] = []
        self._collecting = 0.0
        self._before = time.perf_counter(), 0, self._totals()

    def at_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Time a garbage collection, as one of ``gc.callbacks``, unless a compile runs."""
        if phase == "start":
            self._collecting = 0.0 if is_compiling() else time.perf_counter()
        elif self._collecting:
            self.collected.seconds += time.perf_counter() - self._collecting
            self.collected.calls += 1
            self.collected.timed += 1

    @contextmanager
    def apart(self) -> Iterator[Callable[[], int]]:
        """Exclude a block from the times; yields a function that counts the block's launches."""
        before = {key: (s.calls, s.timed, s.seconds) for key, s in list(self.spent.items())}

        def launched() -> int:
            return sum(s.calls - before.get(k, (0,))[0] for k, s in self.spent.items())

        try:
            yield launched
        finally:
            for key, spent in self.spent.items():
                spent.calls, spent.timed, spent.seconds = before.get(key, (0, 0, 0.0))

    def cost_us(self) -> float:
        """Return the overhead of timing a launch on a CPU, in microseconds."""
        timed = _on_cpu(lambda: None, Spent(), Spent())
        start = time.perf_counter()
        for _ in range(_COSTED):
            timed()
        return (time.perf_counter() - start) / _COSTED * 1e6

    def watch_calls(self, gm: fx.GraphModule, name: str, options: Options) -> CallHooks | None:
        device = main_device(gm)
        recorded = options.cudagraphs and device.type == "cuda"
        return None if recorded or options.verify else self.hooks(graph_id(name), device)

    def hooks(self, graph: str, device: torch.device) -> CallHooks:
        """Return hooks that time a graph's launches by name, and its calls under the name ""."""
        self._devices.append(device.type)
        timing = _on_gpu if device.type == "cuda" else _on_cpu

        def launch(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            return timing(call, self.spent.setdefault((graph, name), Spent()), self.collected)

        def around(call: BoxedCall) -> BoxedCall:
            timed = launch("", call)

            def run(args: list[Any]) -> Any:
                self.at_graph(graph)
                return timed(args)

            return run

        return CallHooks(around, launch)

    def totals(self, graph: str) -> Mapping[str, tuple[int, float]]:
        """Return (calls, seconds) of everything that a graph launched, by name."""
        rows = [(name, s) for (of, name), s in list(self.spent.items()) if of == graph and s.calls]
        return {name: (spent.calls, spent.total()) for name, spent in rows}

    def lap(self) -> Lap:
        """Return the times since the last lap, or since the clock began."""
        if "cuda" in self._devices:
            torch.cuda.synchronize()
        start, graphs, before = self._before
        now = time.perf_counter(), len(self._devices), self._totals()
        self._before = now
        spent = {}
        for key, (calls, seconds) in now[2].items():
            known, known_seconds = before.get(key, (0, 0.0))
            if calls > known:
                spent[key] = calls - known, max(seconds - known_seconds, 0.0)
        return Lap(now[0] - start, spent, now[1] > graphs)

    def _totals(self) -> dict[tuple[str, str], tuple[int, float]]:
        return {key: (s.calls, s.total()) for key, s in list(self.spent.items())}


@contextmanager
def clock_running() -> Iterator[Clock]:
    """Time the graphs that are compiled in this block, as long as they live."""
    clock = Clock()
    gc.callbacks.append(clock.at_collection)
    try:
        with observing(clock):
            yield clock
    finally:
        gc.callbacks.remove(clock.at_collection)


def _on_cpu(call: Callable[..., Any], spent: Spent, collected: Spent) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = time.perf_counter() - collected.seconds
        try:
            return call(*args)
        finally:
            spent.seconds += time.perf_counter() - collected.seconds - start
            spent.calls += 1
            spent.timed += 1

    return timed


def _on_gpu(call: Callable[..., Any], spent: Spent, collected: Spent) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        spent.calls += 1
        if spent.timed + len(spent.events) >= _TIMED_CALLS:
            return call(*args)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            return call(*args)
        finally:
            end.record()
            spent.events.append((start, end))

    return timed


# -- a call timed beside another one ---------------------------------------------------------------


def time_in_turn(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the median microseconds of each call, in turn, so that noise is the same for all."""
    spent: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 2):  # two to warm up
        for call, own in zip(calls, spent, strict=True):
            start = time.perf_counter()
            call()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            own.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(own[2:]) for own in spent]


def differentiated(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[[], None]:
    """Return a call of ``fn`` with its backward, where an argument requires a gradient."""
    leaves = [tensor for tensor in tensors_in(args) if tensor.requires_grad]

    def call() -> None:
        roots = [tensor for tensor in tensors_in(fn(*args)) if tensor.requires_grad]
        if roots and leaves:
            ones = [torch.ones_like(root) for root in roots]
            torch.autograd.grad(roots, leaves, ones, allow_unused=True)

    return call
