"""Seconds that kernels, eager kernels and whole graphs take while a program runs, if somebody asks.

``bind`` gives each callable of a printed wrapper to the clock of its time, if there is one: there
is none but within ``fusec.watch``, so that a program that nobody watches calls what it always does.
On a CPU the clock is read around each call. On a GPU, where calls return at once, it is a pair of
events for each of the first calls, and the others count as their mean.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

_EXTERN = "extern_"
"""What stands before a node's name in the wrapper's name of its callable."""
_TIMED_CALLS = 200
"""On a GPU: calls of one kernel that have events."""


Around: TypeAlias = "Callable[[Callable[..., Any], Spent], Callable[..., Any]]"


@dataclass(slots=True)
class Spent:
    """Calls of one thing, and the seconds that ``timed`` of them took."""

    calls: int = 0
    timed: int = 0
    seconds: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def total(self) -> float:
        """Return the seconds of all calls; waits for the device where events are pending."""
        for start, end in self.events:
            end.synchronize()
            self.seconds += start.elapsed_time(end) / 1e3
        self.timed += len(self.events)
        self.events.clear()
        return self.seconds * self.calls / self.timed if self.timed else 0.0


class Clock:
    """What was spent, by graph and by the name of what was called; the graph's own name is ""."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], Spent] = {}

    def of_graph(self, graph: str, device: torch.device) -> GraphClock:
        """Return what times one graph's callables."""
        return GraphClock(self, graph, _on_gpu if device.type == "cuda" else _on_cpu)

    def totals(self, graph: str) -> Mapping[str, tuple[int, float]]:
        """Return (calls, seconds) of everything that a graph called, by name."""
        rows = [(name, s) for (of, name), s in list(self.spent.items()) if of == graph and s.calls]
        return {name: (spent.calls, spent.total()) for name, spent in rows}


class GraphClock:
    """Wraps what a printed wrapper calls, and the wrapper itself.

    An operator is one callable for all of its calls in a graph, so the n-th of a run has a name of
    its own, "mm.default #n": as the calls stand in the wrapper.
    """

    def __init__(self, clock: Clock, graph: str, around: Around) -> None:
        self._clock, self._graph, self._around = clock, graph, around
        self._position: Counter[str] = Counter()

    def kernel(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callable that is timed under a name."""
        return self._around(call, self._clock.spent.setdefault((self._graph, name), Spent()))

    def wrap(self, namespace: dict[str, Any], kernels: Iterable[str]) -> dict[str, Any]:
        """Return the names of a wrapper with kernels and callables of eager kernels timed."""
        externs = [name for name in namespace if name.startswith(_EXTERN)]
        timed = {
            name: self.kernel(name.removeprefix(_EXTERN), namespace[name])
            for name in (*kernels, *externs)
        }
        return namespace | timed

    def operator(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callable whose calls are timed by their position in the graph's run."""
        made: list[Callable[..., Any]] = []

        def timed(*args: Any, **kwargs: Any) -> Any:
            number = self._position[name]
            self._position[name] += 1
            while number >= len(made):  # by more than one where threads share the graph
                made.append(self.kernel(f"{name} #{len(made)}", call))
            return made[number](*args, **kwargs)

        return timed

    def graph(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapper, timed under the name ""."""
        timed = self.kernel("", call)

        def run(args: list[Any]) -> Any:
            self._position.clear()
            return timed(args)

        return run


_clocks: list[Clock] = []


def current_clock() -> Clock | None:
    """Return the clock that graphs compiled now are given to; None where nobody watches."""
    return _clocks[-1] if _clocks else None


@contextmanager
def clock_running() -> Iterator[Clock]:
    """Time the graphs that are compiled in this block, as long as they live."""
    clock = Clock()
    _clocks.append(clock)
    try:
        yield clock
    finally:
        _clocks.remove(clock)


def _on_cpu(call: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent.seconds += time.perf_counter() - start
            spent.calls += 1
            spent.timed += 1

    return timed


def _on_gpu(call: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        spent.calls += 1
        if spent.timed + len(spent.events) >= _TIMED_CALLS:
            return call(*args, **kwargs)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        try:
            return call(*args, **kwargs)
        finally:
            end.record()
            spent.events.append((start, end))

    return timed
