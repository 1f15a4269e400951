"""What was seen of a program that ran: one record, which ``run``, ``watch`` and ``explain`` read.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "what", "seconds", "compile_seconds": {phase: seconds}, "peak_bytes",
     "advice": [text],
     "breaks": [{"place": {"path", "line", "function", "code"}, "reason", "skipped", "count",
                 "remedy": {"change", "setting"}}],
     "recompiles": [{"place", "reason", "remedy", "seconds", "count"}],
     "graphs": [{"compile", "name", "target", "cached", "problem", "seconds": {stage: seconds},
                 "kernels": [{"name", "code", "ops", "module", "source"}],
                 "externs": [{"name", "op", "reason", "module", "source"}],
                 "place", "calls", "run_seconds"}],
     "launches": [{"graph", "name", "module", "eager", "calls", "seconds"}]}

Seconds are of the wall. ``seconds`` of a launch are null where nobody measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from fusec.report.breaks import Break, Place, Recompile
from fusec.summary import GraphSummary

SCHEMA = 1
_BY_CHOICE = "runs in the library"
"""How the reason of products and attentions ends: the library computes what is fast there."""
_SLOW_SHARE = 0.1
"""The share of a program's time in graphs from which an eager kernel is worth a line of advice."""


_LAUNCH_SECONDS = 1e-5
"""What a launch may take, its host's part included."""
_MANY_CALLS = 100


@dataclass(frozen=True, slots=True)
class Launch:
    """What one graph called, a kernel or an eager kernel, all of its calls together.

    Attributes:
        name: what it computes, as "k3: add + layer_norm" or "mm.default".
        module: where it belongs, layers folded: "h.*.mlp".
        reason: why an eager kernel is not lowered; "" for a kernel.
    """

    graph: str
    name: str
    module: str
    eager: bool
    reason: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SeenGraph:
    """One graph, the function that it is of, and how often and how long it ran."""

    summary: GraphSummary
    place: Place
    calls: int = 0
    run_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What happened while a program ran.

    Attributes:
        what: the program.
        compile_seconds: phase -> seconds: Dynamo, AOTAutograd and stages of fusec.
        peak_bytes: the most memory that the process, or on a GPU its tensors, took.
        unseen: what could not be followed, and why: the rest of a call on tensors without values.
    """

    what: str
    seconds: float = 0.0
    graphs: tuple[SeenGraph, ...] = ()
    breaks: tuple[Break, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    launches: tuple[Launch, ...] = ()
    compile_seconds: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    unseen: str = ""

    @property
    def run_seconds(self) -> float:
        """Seconds in compiled graphs."""
        return sum(graph.run_seconds for graph in self.graphs)

    def advice(self) -> list[str]:
        """Return what to do, what costs most first."""
        return [text for _, _, text in sorted(_advice(self), key=lambda a: (a[0], -a[1]))]

    def by_module(self) -> list[tuple[str, float, int]]:
        """Return (module, seconds, calls) of what graphs launched, the slowest first."""
        found: dict[str, tuple[float, int]] = {}
        for launch in self.launches:
            seconds, calls = found.get(launch.module, (0.0, 0))
            found[launch.module] = seconds + launch.seconds, calls + launch.calls
        rows = [(module, *spent) for module, spent in found.items()]
        return sorted(rows, key=lambda row: -row[1])

    def slowest(self, *, eager: bool) -> list[Launch]:
        """Return kernels, or eager kernels, those of one name and module as one; slowest first."""
        found: dict[tuple[str, str], list[Launch]] = {}
        for launch in self.launches:
            if launch.eager == eager:
                found.setdefault((launch.name, launch.module), []).append(launch)
        rows = [
            Launch("", name, module, eager, alike[0].reason, *_added(alike))
            for (name, module), alike in found.items()
        ]
        return sorted(rows, key=lambda row: -row.seconds)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the JSON form; the module's docstring has its schema."""
        document = {"schema": SCHEMA, **asdict(self), "advice": self.advice()}
        document["graphs"] = [
            {**asdict(g.summary), **{k: v for k, v in asdict(g).items() if k != "summary"}}
            for g in self.graphs
        ]
        return json.dumps(document, indent=indent)

    def __str__(self) -> str:
        # Local: the page reads this module.
        from fusec.report.page import page

        return page(self)


def folded(module: str) -> str:
    """Return a module's path with the numbers of layers left out: "h.3.mlp" is "h.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _added(launches: Iterable[Launch]) -> tuple[int, float]:
    rows = list(launches)
    return sum(row.calls for row in rows), sum(row.seconds for row in rows)


def _advice(seen: Seen) -> Iterable[tuple[int, float, str]]:
    """Yield (rank, weight within it, text)."""
    for graph in seen.graphs:
        if graph.summary.problem:
            yield (
                0,
                graph.run_seconds,
                f"graph {graph.summary.id} runs as eager kernels: {graph.summary.problem}",
            )
    for one in seen.breaks:
        yield 1 - one.skipped, one.count, f"{one.place}\n{one.said}\n-> {one.remedy}"
    for again in seen.recompiles:
        yield 2, again.seconds, f"{again.place}\n{again.said}\n-> {again.remedy}"
    for launch in seen.slowest(eager=True):
        share = launch.seconds / seen.run_seconds if seen.run_seconds else 0.0
        if share > _SLOW_SHARE and not launch.reason.endswith(_BY_CHOICE):
            where = f" of {launch.module}" if launch.module else ""
            text = f"{launch.name}{where} takes {share:.0%} of the graphs' time: {launch.reason}"
            yield 3, launch.seconds, text
    for graph in seen.graphs:
        launches = len(graph.summary.kernels) + len(graph.summary.externs)
        if not graph.summary.problem and _is_launch_bound(graph, launches, seen.seconds):
            each = graph.run_seconds / graph.calls * 1e6
            yield (
                4,
                graph.run_seconds,
                f"{graph.place}\ngraph {graph.summary.id} is launch-bound: {launches} launches in "
                f"{each:.3g} us a call\n-> larger batches, or fewer calls; on a GPU, "
                'mode="reduce-overhead"',
            )


def _is_launch_bound(graph: SeenGraph, launches: int, seconds: float) -> bool:
    """Return True for a graph of many short calls: nothing in it takes as long as a launch."""
    if graph.calls < _MANY_CALLS or not launches:
        return False
    short = graph.run_seconds / graph.calls / launches < _LAUNCH_SECONDS
    return short and graph.run_seconds > _SLOW_SHARE * seconds
