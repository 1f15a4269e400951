"""One compile's record: the text of every stage, times, fusion decisions, externs and why.

A ``Trace`` is an argument of the pipeline, never a global. Texts are made only if ``texts`` is set,
for printing a graph can cost more than compiling it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Trace:
    """What happened while one graph was compiled.

    Attributes:
        texts: keep the printed form of each stage.
        stages: stage -> text, in order.
        seconds: stage -> CPU seconds of this process.
        cached: the kernels came from the cache.
        problem: why the graph runs as eager kernels, or None.
        structures: stage -> the structure itself, for reports.
    """

    name: str
    texts: bool = False
    stages: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cached: bool = False
    problem: str | None = None
    structures: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the CPU time of a block to a stage."""
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - start

    def keep(self, stage: str, structure: Any, text: Callable[[], str]) -> None:
        """Record a stage's structure and, if wanted, its text."""
        if self.texts:
            self.structures[stage] = structure
            self.stages[stage] = text()

    @property
    def total_seconds(self) -> float:
        """CPU seconds of all stages."""
        return sum(self.seconds.values())
