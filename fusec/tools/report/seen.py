"""The record of a program that ran, which ``run``, ``watch`` and ``explain`` read.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "what", "seconds", "compile_seconds": {phase: seconds}, "peak_bytes",
     "advice": [text], "unmended": [text], "notes": [text],
     "collections", "collection_seconds", "compared": [{"compile", "fusec_us", "eager_us"}],
     "breaks": [{"place": {"path", "line", "function", "code"}, "reason", "skipped", "count",
                 "remedy": {"change", "setting", "meant"}}],
     "recompiles": [{"place", "reason", "remedy", "seconds", "count"}],
     "graphs": [{"compile", "name", "target", "cached", "problem", "seconds": {stage: seconds},
                 "kernels": [{"name", "code", "ops", "module", "source"}],
                 "externs": [{"name", "op", "reason", "module", "source"}],
                 "place", "calls", "run_seconds"}],
     "launches": [{"graph", "name", "module", "eager", "calls", "seconds"}]}

Seconds are of the wall clock. ``seconds`` of a launch are null where they were not measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from fusec.tools.report.advice import advice_on
from fusec.tools.report.beside import Compared
from fusec.tools.report.breaks import Break, Place, Recompile
from fusec.tools.report.layers import Layers
from fusec.tools.summary import GraphSummary

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel or an eager kernel of one graph, with the sums of all of its calls.

    Attributes:
        name: what it computes, as "k3: add + layer_norm" or "mm.default".
        module: that it belongs to, layers folded: "h.*.mlp".
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
    """One graph, the function that it comes from, and how often and how long it ran."""

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
        compared: times of small graphs beside eager's; empty if they were not compared.
        collections, collection_seconds: of garbage, by Python, in no launch's time.
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
    collections: int = 0
    collection_seconds: float = 0.0
    compared: tuple[Compared, ...] = ()

    @property
    def layers(self) -> Layers:
        """The repeated layers among the modules of all graphs."""
        return Layers.of(*(graph.summary.modules for graph in self.graphs))

    @property
    def run_seconds(self) -> float:
        """Seconds in compiled graphs."""
        return sum(graph.run_seconds for graph in self.graphs)

    def advice(self) -> list[str]:
        """Return what to do, what takes most of the time first."""
        return [str(one) for one in advice_on(self) if one.helps]

    def unmended(self) -> list[str]:
        """Return what costs time, too, with no remedy that is known."""
        return [str(one) for one in advice_on(self) if not (one.helps or one.meant)]

    def notes(self) -> list[str]:
        """Return what was compiled again because the program does two things, each in a line."""
        found = [one for one in advice_on(self) if one.meant]
        return [f"{n.place}: {n.seconds:.1f} s more: {n.remedy.partition(': ')[2]}" for n in found]

    def by_module(self) -> list[tuple[str, float, int]]:
        """Return (module, seconds, calls) of what graphs launched, the slowest first."""
        found: dict[str, tuple[float, int]] = {}
        for launch in self.launches:
            seconds, calls = found.get(launch.module, (0.0, 0))
            found[launch.module] = seconds + launch.seconds, calls + launch.calls
        rows = [(module, *spent) for module, spent in found.items()]
        return sorted(rows, key=lambda row: -row[1])

    def slowest(self, *, eager: bool) -> list[Launch]:
        """Return a graph's kernels of one code, or all its eager kernels of one name, as one.

        They are those of one module; the slowest come first.
        """
        found: dict[tuple[str, str, str], list[Launch]] = {}
        for launch in self.launches:
            if launch.eager == eager:
                graph = "" if eager else launch.graph
                found.setdefault((graph, launch.name, launch.module), []).append(launch)
        rows = [
            Launch(graph, name, module, eager, alike[0].reason, *_added(alike))
            for (graph, name, module), alike in found.items()
        ]
        return sorted(rows, key=lambda row: -row.seconds)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the JSON form; the module's docstring has its schema."""
        document = {"schema": SCHEMA, **asdict(self), "advice": self.advice()}
        document |= {"unmended": self.unmended(), "notes": self.notes()}
        document["graphs"] = [
            {**asdict(g.summary), **{k: v for k, v in asdict(g).items() if k != "summary"}}
            for g in self.graphs
        ]
        return json.dumps(document, indent=indent)

    def __str__(self) -> str:
        # Local: the page reads this module.
        from fusec.tools.report.page import page

        return page(self)


def _added(launches: Iterable[Launch]) -> tuple[int, float]:
    rows = list(launches)
    return sum(row.calls for row in rows), sum(row.seconds for row in rows)
