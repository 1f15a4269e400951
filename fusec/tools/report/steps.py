"""Find the steps of a program, and record the time of each.

A step of a script ends with ``Optimizer.step`` of its first optimizer; where none runs, it begins
when the graph that was called first is called again. The latest steps are kept, each as one ``Lap``
of the clock, except those that warm up, compile something, or are traced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import profile

from fusec.tools.clock import Clock, Lap, Spent

WARMUP = 2
"""Steps that do not count, after everything is compiled."""
_KEPT = 64
_TRACED = 2
OPTIMIZER = ("", "optimizer.step")
"""The key of an optimizer's steps in a lap."""


class Steps:
    """The laps of a program's steps.

    Attributes:
        laps: the latest of those that count.
        cold: the latest warm-up step, in case no others follow.
        traced: whether a trace was written.
    """

    def __init__(self, clock: Clock, trace: Path | None = None) -> None:
        self.laps: deque[Lap] = deque(maxlen=_KEPT)
        self.cold: Lap | None = None
        self.traced = False
        self._clock, self._trace = clock, trace
        self._warm, self._left = 0, _TRACED
        self._profiler: Any = None
        self._first_graph = ""
        self._optimizer: object = None

    def end(self) -> None:
        """End a step."""
        lap = self._clock.lap()
        if lap.compiled or self._warm < WARMUP:
            self._warm += not lap.compiled
            self.cold = self.cold if lap.compiled else lap
        elif self._trace is not None:
            self._record(self._trace)
        else:
            self.laps.append(lap)

    def _record(self, file: Path) -> None:
        """Run a profiler for some steps, which do not count."""
        if self._profiler is None:
            self._profiler = profile()
            self._profiler.start()
        elif self._left > 1:
            self._left -= 1
        else:
            self.close()
            self._profiler.export_chrome_trace(str(file))
            self.traced, self._trace = True, None
            self._clock.lap()

    def close(self) -> None:
        """Stop the profiler, if it runs."""
        if self._profiler is not None and self._trace is not None:
            self._profiler.stop()

    @contextmanager
    def found_in_a_script(self) -> Iterator[None]:
        """Find the steps of a script that runs in a block."""
        started = [0.0]

        def before(*_: object) -> None:
            started[0] = time.perf_counter()

        def after(optimizer: object, *_: object) -> None:
            spent = self._clock.spent.setdefault(OPTIMIZER, Spent())
            spent.seconds += time.perf_counter() - started[0]
            spent.calls += 1
            spent.timed += 1
            if self._optimizer is None:
                self._optimizer = optimizer
                self.laps.clear()
            if optimizer is self._optimizer:
                self.end()

        hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        self._clock.at_graph = self._begins
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._clock.at_graph = lambda graph: None
            self.close()

    def _begins(self, graph: str) -> None:
        """End a step if the first graph is called; it includes recompiles for other sizes."""
        name = graph.partition("/")[0]
        self._first_graph = self._first_graph or name
        if name == self._first_graph and self._optimizer is None:
            self.end()
