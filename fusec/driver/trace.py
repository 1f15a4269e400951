"""The record of one compile: output and time of each stage, and why a graph runs as eager kernels.

A ``Trace`` is an argument of the pipeline, never a global. Outputs of stages are kept only if
``texts`` is set, and printed on demand: printing a graph can cost more than compiling it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fusec.errors import note_stage


@dataclass(slots=True, eq=False)
class Record:
    """The output of one stage.

    Attributes:
        print: returns the structure's printed form.
        before: prints the stage's input; None where that is another kind of structure.
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
    """The record of one graph's compile.

    Attributes:
        texts: keep the output of each stage.
        records: stage -> its output, in the order of their last runs.
        seconds: stage -> CPU seconds of this process.
        wall_seconds: stage -> wall seconds, other processes included.
        phase: is entered around each stage, with its name.
        target: the name of the target.
        blobs: its entry in the cache, by name; without kernels while ``built`` is set.
        built: waits for kernels that another program compiles, and returns the whole entry.
        cached: the kernels came from the cache.
        key: of its entry in the cache.
        problem: why the graph runs as eager kernels, or None.
    """

    name: str
    texts: bool = False
    records: dict[str, Record] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    wall_seconds: dict[str, float] = field(default_factory=dict)
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
    target: str = ""
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    built: Callable[[], Mapping[str, bytes]] | None = None
    cached: bool = False
    key: str = ""
    problem: str | None = None

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage; an exception gets a note of the stage."""
        start, wall = time.process_time(), time.perf_counter()
        try:
            with self.phase(stage):
                yield
        except Exception as error:
            note_stage(error, stage)
            raise
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - start
            spent = self.wall_seconds.get(stage, 0.0) + time.perf_counter() - wall
            self.wall_seconds[stage] = spent

    def keep(
        self,
        stage: str,
        structure: Any,
        text: Callable[[], str],
        before: Callable[[], str] | None = None,
    ) -> None:
        """Record the output of a stage if ``texts`` is set; a later run replaces an earlier one."""
        if self.texts:
            self.records.pop(stage, None)
            self.records[stage] = Record(structure, text, before)

    @property
    def entry(self) -> Mapping[str, bytes]:
        """The entry in the cache, by name; waits for its kernels.

        Raises:
            BuildError: if these could not be built.
        """
        return self.blobs if self.built is None else self.built()

    @property
    def manifest(self) -> bytes:
        """The entry's description of its kernels, JSON."""
        return self.blobs.get("manifest.json", b"")

    @property
    def wrapper(self) -> str:
        """The source of its wrapper."""
        return self.blobs.get("wrapper.py", b"").decode()

    @property
    def total_seconds(self) -> float:
        """CPU seconds of all stages."""
        return sum(self.seconds.values())
