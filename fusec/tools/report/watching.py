"""``with fusec.watch() as seen:`` records what torch and fusec compile and run in a block.

Torch logs its compiles to ``torch.__trace``, for ``tlparse``; fusec logs each of its graphs there,
too (``fusec/tools/summary.py``). The watcher is one more handler of that logger, so that it sees
what any tool would, and costs nothing outside of a block. Times at run time are those of
``fusec/tools/clock.py``.

Worked example::

    with fusec.watch() as seen:
        train(model)
    print(seen)
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fusec.tools.clock import Clock, clock_running
from fusec.tools.report.breaks import (
    Break,
    Place,
    is_library,
    is_planned,
    merge_breaks,
    merge_recompiles,
    place_of_compile,
    read_break,
    read_recompile,
    with_code,
)
from fusec.tools.report.layers import Layers
from fusec.tools.report.observe import UNSEEN
from fusec.tools.report.run_report import Launch, Seen, SeenGraph
from fusec.tools.report.run_script import Beside
from fusec.tools.summary import ARTIFACT, ExternSummary, GraphSummary, KernelSummary
from fusec.torch_interior import interned, trace_log

_STAGES = ("key", "cache", "capture", "passes", "codegen", "build", "bind")
_BREAK = "dynamo_graph_break_reason"


def _caller(stack: Sequence[Mapping[str, Any]]) -> Place:
    """Return the innermost line of the user's program in a stack of torch's trace."""
    frames = [Place(interned(f["filename"]), f["line"], f["name"]) for f in stack]
    own = [frame for frame in frames if not is_library(frame.path)] or frames
    return with_code(own[-1]) if own else Place("", 0, "")


class _Listener(logging.Handler):
    """Keeps breaks, graphs and compiles from torch's trace; never fails the program.

    Attributes:
        callers: the user's lines that led to compiles, by the number of the compile.
    """

    summaries_only = True

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[GraphSummary] = []
        self.breaks: list[Break] = []
        self.metrics: list[Mapping[str, Any]] = []
        self.callers: dict[str, Place] = {}
        self.unseen = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(getattr(record, "metadata", {}), getattr(record, "payload", None))
        except Exception:
            logging.getLogger("fusec.watch").debug("not understood", exc_info=True)

    def _take(self, metadata: Mapping[str, Any], payload: str | None) -> None:
        name = metadata.get("artifact", {}).get("name")
        if name == _BREAK and payload and not is_planned(payload):
            self.breaks.append(read_break(payload))
        elif name == UNSEEN and payload:
            self.unseen = payload
        elif name == ARTIFACT and payload:
            self.graphs.append(GraphSummary.from_json(payload))
        if "dynamo_start" in metadata:
            number = f"{metadata['frame_id']}/{metadata['frame_compile_id']}"
            self.callers[number] = _caller(metadata["dynamo_start"]["stack"])
        for kind in ("compilation_metrics", "bwd_compilation_metrics"):
            if kind in metadata:
                self.metrics.append(metadata[kind])


class Watch:
    """The observation of a block: ``seen`` is its record so far, which is what it prints."""

    def __init__(self, what: str, listener: _Listener, clock: Clock) -> None:
        self._what, self._told, self.clock = what, listener, clock
        self._start, self._end = time.perf_counter(), 0.0
        self.beside = Beside(clock)

    @property
    def seen(self) -> Seen:
        """The record of what was seen up to now, or in the whole block once it is left."""
        metrics, graphs = self._told.metrics, self._told.graphs
        compiles = [row for row in metrics if row.get("co_name")]
        places = {str(row["compile_id"]): self._place(row) for row in compiles}
        totals = {graph.id: self.clock.totals(graph.id) for graph in graphs}
        nowhere = Place("", 0, "")
        layers = Layers.of(*(graph.modules for graph in graphs))
        return Seen(
            self._what,
            (self._end or time.perf_counter()) - self._start - self.beside.seconds,
            tuple(
                SeenGraph(g, places.get(g.compile, nowhere), *totals[g.id].get("", (0, 0.0)))
                for g in graphs
            ),
            merge_breaks(self._told.breaks),
            merge_recompiles(
                r for row in metrics if (r := read_recompile(row, self._place(row))) is not None
            ),
            tuple(launch for g in graphs for launch in _launches(g, totals[g.id], layers)),
            _phases(metrics, graphs),
            _peak(),
            self._told.unseen,
            self.clock.collected.calls,
            self.clock.collected.seconds,
            tuple(self.beside.compared),
        )

    def _place(self, metrics: Mapping[str, Any]) -> Place:
        """Return the place of a compiled function; of one of torch's own, the calling line."""
        place = place_of_compile(metrics)
        caller = self._told.callers.get(str(metrics.get("compile_id")))
        return caller if caller is not None and is_library(place.path) else place

    def to_json(self) -> str:
        """Return the JSON form, as of ``Seen``."""
        return self.seen.to_json()

    def __str__(self) -> str:
        return str(self.seen)


@contextmanager
def watch(what: str = "the block") -> Iterator[Watch]:
    """Watch what is compiled and run in a block.

    Graphs that were compiled before are not seen, and what is compiled in the block is timed as
    long as it lives: a microsecond for each launch.
    """
    listener = _Listener()
    trace_log.addHandler(listener)
    try:
        with clock_running() as clock:
            watched = Watch(what, listener, clock)
            try:
                yield watched
            finally:
                watched._end = time.perf_counter()
    finally:
        trace_log.removeHandler(listener)


def _launches(
    graph: GraphSummary, totals: Mapping[str, tuple[int, float]], layers: Layers
) -> Iterator[Launch]:
    """Yield the launches of a graph."""
    for one in graph.launches:
        match one:
            case KernelSummary():
                name, reason = f"{one.code}: {one.computes}", ""
            case ExternSummary():
                name, reason = one.op, one.reason
        spent = totals.get(one.name, (0, 0.0))
        eager, module = isinstance(one, ExternSummary), layers.folded(one.module)
        yield Launch(graph.id, name, module, eager, reason, *spent)


def _phases(
    metrics: Iterable[Mapping[str, Any]], graphs: Iterable[GraphSummary]
) -> dict[str, float]:
    """Return the seconds of all compiles by phase."""
    rows = list(metrics)
    backwards = [row for row in rows if row.get("is_forward") is False]
    stages = {s: sum(g.seconds.get(s, 0.0) for g in graphs) for s in _STAGES}
    behind = _sum(rows, "backend_compile_time_s")
    told = _sum(rows, "structured_logging_overhead_s")
    before = max(_sum(rows, "entire_frame_compile_time_s") - behind - told, 0.0)
    behind += _sum(backwards, "duration_us") / 1e6
    own = sum(stages.values())
    return {"Dynamo": before, "AOTAutograd": max(behind - own, 0.0)} | {
        f"fusec: {stage}": seconds for stage, seconds in stages.items() if seconds >= 0.0005
    }


def _sum(rows: Iterable[Mapping[str, Any]], column: str) -> float:
    return sum(float(row.get(column) or 0.0) for row in rows)


def _peak() -> int:
    """Return the most bytes that tensors took on a GPU, or else the process in memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
