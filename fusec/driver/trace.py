"""The record of one compile: its entry in the cache, the time of each stage, and why it failed.

A ``Trace`` is an argument of the pipeline, never a global.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fusec.errors import Unsupported, note_stage


@dataclass(slots=True, eq=False)
class Trace:
    """The record of one graph's compile.

    Attributes:
        seconds: stage -> CPU seconds of this process.
        wall_seconds: stage -> wall seconds, other processes included.
        phase: is entered around each stage, with its name.
        target: the name of the target.
        blobs: its entry in the cache, by name; without kernels while ``built`` is set.
        built: waits for kernels that another program compiles, and returns the whole entry.
        cached: the kernels came from the cache.
        key: of its entry in the cache.
        passes: a pass of the user that has run -> the lines that it made or rewrote.
        problem: why the graph runs as eager kernels, or None.
        reason: of an ``Unsupported`` that is the problem; "" of any other.
        outside: what PyTorch runs outside of compiled graphs, an operation between them or "a
            whole graph"; "" of a compiled one.
    """

    name: str
    seconds: dict[str, float] = field(default_factory=dict)
    wall_seconds: dict[str, float] = field(default_factory=dict)
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
    target: str = ""
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    built: Callable[[], Mapping[str, bytes]] | None = None
    cached: bool = False
    key: str = ""
    passes: dict[str, int] = field(default_factory=dict)
    problem: str | None = None
    reason: str = ""
    outside: str = ""

    def fail(self, error: Exception) -> None:
        """Note why the graph runs as eager kernels."""
        self.problem = f"{type(error).__name__}: {error}"
        self.reason = error.reason if isinstance(error, Unsupported) else ""

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
