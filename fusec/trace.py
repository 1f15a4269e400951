"""One compile's record: what each stage made, times, and why a graph runs as eager kernels.

A ``Trace`` is an argument of the pipeline, never a global. What stages make is kept only if
``texts`` is set, and printed when it is asked for: printing a graph can cost more than compiling
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Record:
    """What one stage made.

    Attributes:
        print: returns the structure's printed form.
        before: prints the same of what the stage was given; None where that is something else.
    """

    structure: Any
    print: Callable[[], str]
    before: Callable[[], str] | None = None
    _text: str | None = None

    @property
    def text(self) -> str:
        """The structure's printed form."""
        if self._text is None:
            self._text = self.print()
        return self._text

    @property
    def changed(self) -> bool:
        """Whether the stage changed what is printed."""
        return self.before is None or self.before() != self.text


@dataclass(slots=True, eq=False)
class Trace:
    """What happened while one graph was compiled.

    Attributes:
        texts: keep what each stage made.
        records: stage -> what it made, in the order of their last runs.
        seconds: stage -> CPU seconds of this process.
        cached: the kernels came from the cache.
        problem: why the graph runs as eager kernels, or None.
    """

    name: str
    texts: bool = False
    records: dict[str, Record] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cached: bool = False
    problem: str | None = None

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the CPU time of a block to a stage."""
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - start

    def keep(
        self,
        stage: str,
        structure: Any,
        text: Callable[[], str],
        before: Callable[[], str] | None = None,
    ) -> None:
        """Record what a stage made, if that is wanted; the last run of a stage is what is kept."""
        if self.texts:
            self.records.pop(stage, None)
            self.records[stage] = Record(structure, text, before)

    @property
    def total_seconds(self) -> float:
        """CPU seconds of all stages."""
        return sum(self.seconds.values())
