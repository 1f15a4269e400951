"""The content of a report, as plain data: ``document_of`` makes it, ``render`` prints it.

Sizes are bytes, times microseconds, rates per microsecond; each time has its origin (modelled,
expected from the machine code, measured). Texts that many boxes share, such as the source of
equal kernels, are stored once: a box has their numbers.

Of a program that runs, the graphs are ``Collected``: the compiler passes on each to its observers,
those from the cache, too. Once the program is done, they are taken through the pipeline once more,
which times nothing and runs nothing: the result is what ran, as races return earlier verdicts.

Worked example::

    >>> document = document_of("block.py:Block", staged, seen)
    >>> document.graphs[0].boxes[0].title
    'add + layer_norm'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from fusec.codegen.targets import find_target
from fusec.driver.compiler import target_for
from fusec.driver.launches import graph_id
from fusec.driver.observers import Observer
from fusec.driver.trace import Trace
from fusec.errors import Unsupported, describe_failure
from fusec.frontend.capture import main_device
from fusec.frontend.modules import module_kinds
from fusec.ir import text
from fusec.ir.decision import Decision
from fusec.ir.expr import Buffer
from fusec.ir.names import operation_words
from fusec.options import Options
from fusec.passes.schedule.plan import print_plan
from fusec.tools.report.eager_cost import EagerCall, graph_cost
from fusec.tools.report.explanation import GraphReport, on_target, report_graph
from fusec.tools.report.html.drawn import (
    Alike,
    DrawnStep,
    Segment,
    drawn_steps,
    fold_calls,
    fold_steps,
    segments,
)
from fusec.tools.report.html.layout import Layout, lay_out
from fusec.tools.report.html.plots import Roof, cost_of, roof_of
from fusec.tools.report.layers import Layers
from fusec.tools.report.observe import Observed
from fusec.tools.report.run_report import Advice, Launch, Seen, advice_on, summed
from fusec.tools.report.stages import Staged, take_through
from fusec.tools.report.static_report import StaticChecks, check_known
from fusec.tools.report.static_rules import CheckedKernel, Finding, find_faults
from fusec.tools.report.traffic import Usage, buffer_bytes, usage_of

SHOWN_OPS = 8
SHOWN_DECISIONS = 24
LANGUAGES = {"cpp": "C++", "triton": "Triton"}
STAGES = {"ptx": "PTX", "sass": "SASS", "amdgcn": "assembly"}
"""The stages below the source that are shown -> their labels."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A text of a box: its label, and its number among the document's texts."""

    label: str
    text: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A buffer that a launch reads or writes."""

    name: str
    type: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch, and their origin: "modelled", "expected", "measured"."""

    us: float
    word: str


@dataclass(frozen=True, slots=True)
class Box:
    """Equal launches of repeated layers, drawn as one.

    Attributes:
        kind: "kernel", "foreach", or "library" for an eager kernel.
        names: of all of them.
        module: layers folded.
        bytes, operations: of one launch; ``floor_us`` is the time that memory needs for the bytes.
        share: of all its launches, in the bytes that the graph moves.
        facts: of the machine code, as (name, value).
        faults, warnings: rules of ``check --static`` that it breaks.
        feeds, fed_by: positions of boxes.
        calls: positions of the eager launches that come from its lines.
    """

    kind: str
    title: str
    names: tuple[str, ...]
    module: str
    bytes: int
    share: float
    operations: float
    floor_us: float
    timing: Timing
    reason: str
    lines: tuple[str, ...]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    decisions: tuple[Decision, ...]
    facts: tuple[tuple[str, str], ...]
    faults: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    listings: tuple[Listing, ...]
    feeds: tuple[int, ...]
    fed_by: tuple[int, ...]
    calls: tuple[int, ...]
    expected: str = ""

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def spent_us(self) -> float:
        """Microseconds of all of its launches in one call."""
        return self.timing.us * self.count

    @property
    def heading(self) -> str:
        return f"{self.title} in {self.module}" if self.module else self.title

    @property
    def name(self) -> str:
        """Its short name."""
        return "eager" if self.kind == "library" else self.names[0]


@dataclass(frozen=True, slots=True)
class Drawing:
    """One graph.

    Attributes:
        problem: why all of it runs as eager kernels, or "".
        calls: what eager execution launches, those of repeated layers together.
    """

    report: GraphReport
    problem: str
    boxes: tuple[Box, ...]
    calls: tuple[Alike[EagerCall], ...]
    segments: tuple[Segment, ...]
    layout: Layout
    usage: Usage | None
    roof: Roof

    @property
    def spent_us(self) -> float:
        """Microseconds of all launches in one call."""
        return sum(box.spent_us for box in self.boxes)

    @property
    def dearest(self) -> int | None:
        """The position of the box that takes most time, or None in a graph without any."""
        times = [box.spent_us for box in self.boxes]
        return times.index(max(times)) if times else None

    @property
    def heading(self) -> str:
        """The graph's name, and the module that it belongs to: "forward, h.3 (Block)"."""
        return (
            f"{self.report.name}, {self.report.called}" if self.report.called else self.report.name
        )


@dataclass(frozen=True, slots=True)
class Document:
    """A report.

    Attributes:
        title: the model or the script.
        seen: breaks and recompiles; of a program that ran, its times, too.
        phases: phase of compiles -> seconds.
    """

    title: str
    target: str
    graphs: tuple[Drawing, ...]
    texts: tuple[str, ...]
    seen: Seen
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        """Whether it is of a program that ran."""
        return bool(self.seen.graphs)

    @property
    def advice(self) -> list[Advice]:
        """What to do, costliest first, where a program ran."""
        return [one for one in advice_on(self.seen) if one.helps] if self.ran else []

    @property
    def spent_us(self) -> float:
        """Microseconds of all launches of all graphs."""
        return sum(graph.spent_us for graph in self.graphs)

    @property
    def words(self) -> str:
        """The origins of the launches' times: "measured", "measured or modelled"."""
        found = {box.timing.word for graph in self.graphs for box in graph.boxes}
        return " or ".join(sorted(found))


Measured = Callable[[Staged, DrawnStep], "Timing | None"]
"""Returns the time of a launch that a run has measured, or None."""


def document_of(
    title: str,
    target: str,
    staged: Sequence[Staged],
    seen: Seen,
    *,
    judged: StaticChecks | None = None,
    measured: Measured = lambda staged, step: None,
) -> Document:
    """Return the report of some graphs.

    Args:
        judged: the facts of their machine code.
        measured: returns the measured time of a launch, if any.
    """
    texts: dict[str, int] = {}  # their numbers
    layers = Layers.of(*(module_kinds(one.observed.graph) for one in staged))
    drawings = tuple(_Drawer(one, texts, judged, measured, layers).drawing() for one in staged)
    phases = dict(seen.compile_seconds)
    for one in () if seen.graphs else staged:  # after a run, ``seen`` has them
        for stage, seconds in one.trace.wall_seconds.items():
            phases[f"fusec: {stage}"] = phases.get(f"fusec: {stage}", 0.0) + seconds
    return Document(
        title,
        target,
        drawings,
        tuple(texts),
        seen,
        phases | ({"machine code": judged.seconds} if judged else {}),
    )


class _Drawer:
    """Draws one graph."""

    def __init__(
        self,
        staged: Staged,
        texts: dict[str, int],
        judged: StaticChecks | None,
        measured: Measured,
        layers: Layers,
    ) -> None:
        self.staged, self.texts, self.measured = staged, texts, measured
        self.layers = layers
        own = [] if judged is None else [k for k in judged.kernels if k.graph == staged.name]
        self.judged = {kernel.name: kernel for kernel in own}
        self.report = report_graph(staged)
        self.steps = fold_steps(drawn_steps(staged), layers)
        self.calls = fold_calls(staged.observed.eager.calls, layers)

    def drawing(self) -> Drawing:
        parts = segments(self.steps, self.calls, self.layers)
        edges = _edges(self.steps)
        boxes = tuple(self.box(k, alike, edges) for k, alike in enumerate(self.steps))
        return Drawing(
            self.report,
            self.staged.problem,
            boxes,
            tuple(self.calls),
            parts,
            lay_out(parts, edges),
            usage_of(self.staged, self.layers),
            roof_of(self.staged.target.machine),
        )

    def box(self, position: int, alike: Alike[DrawnStep], edges: Sequence[tuple[int, int]]) -> Box:
        step, machine = alike.first, self.staged.target.machine
        cost = cost_of(step.step, machine)
        checked = self.judged.get(step.name)
        kernels = () if checked is None else (checked,)
        moved = sum(s.bytes * (s.loop.rounds if s.loop else 1) for s in alike.members)
        ops = operation_words(step.computes)
        title = " + ".join([*ops[:SHOWN_OPS], *["…"] * (len(ops) > SHOWN_OPS)]) or "copy"
        return Box(
            kind=step.kind,
            title=on_target(self.staged.target, title),
            names=tuple(s.name for s in alike.members),
            module=alike.module,
            bytes=step.bytes,
            share=moved / self.report.bytes_moved if self.report.bytes_moved else 0.0,
            operations=cost.operations,
            floor_us=step.bytes / machine.bytes_per_us,
            timing=self.timing(step, checked, cost.us),
            reason=step.reason,
            lines=step.step.origin.source,
            reads=tuple(map(self.tensor, step.step.reads)),
            writes=tuple(map(self.tensor, step.step.writes)),
            decisions=_about(step, self.report.decisions),
            facts=() if checked is None else self.judged_facts(checked),
            faults=find_faults(kernels),
            warnings=find_faults(kernels, fault=False),
            listings=self.listings(step, checked),
            feeds=tuple(b for a, b in edges if a == position),
            fed_by=tuple(a for a, b in edges if b == position),
            calls=_calls_of(alike, self.calls, self.layers),
            expected="" if checked is None or checked.expected is None else str(checked.expected),
        )

    def tensor(self, buffer: Buffer) -> Tensor:
        """Return a buffer by the program's own name, where that has one for it."""
        name = self.staged.observed.names.get(buffer.name, buffer.name)
        name = on_target(self.staged.target, name)
        return Tensor(name, text.print_type(buffer), buffer_bytes(buffer))

    def timing(self, step: DrawnStep, checked: CheckedKernel | None, modelled_us: float) -> Timing:
        seen = self.measured(self.staged, step)
        if seen is not None:
            return seen
        if checked is not None and checked.expected is not None:
            return Timing(checked.expected.us, "expected")
        return Timing(modelled_us, "modelled")

    def judged_facts(self, checked: CheckedKernel) -> tuple[tuple[str, str], ...]:
        static = checked.static
        if static is None:
            return (("does not build", checked.problem),)
        return (
            ("registers a thread", str(static.registers)),
            ("spilled", f"{static.spill_bytes} B"),
            ("shared memory", f"{static.shared_bytes} B"),
            ("blocks a multiprocessor", f"{static.blocks}, occupancy {static.occupancy:.0%}"),
            ("16 bytes at a time", f"{static.wide_share:.0%}" if static.accesses else "no access"),
            ("barriers", str(static.barriers)),
            ("instructions", str(static.instructions)),
        )

    def listings(self, step: DrawnStep, checked: CheckedKernel | None) -> tuple[Listing, ...]:
        """Return a step's texts, from index notation to machine code."""
        compiled = self.staged.compiled

        def listing(label: str, content: str) -> Listing:
            return Listing(label, self.texts.setdefault(content, len(self.texts)))

        found = [listing("Notation", text.print_step(step.step))]
        if compiled is None or not step.code:
            return tuple(found)
        plan = print_plan(step.name, compiled.plans[step.name])
        label = LANGUAGES[self.staged.target.language]
        found += [
            listing("Schedule", plan.replace("    ", "\n    ")),
            listing(label, compiled.sources[step.name]),
        ]
        code = None if checked is None else checked.assembly
        if code is not None:
            shown = [stage for stage in code.stages if stage in STAGES]
            found += [listing(STAGES[stage], code.text(stage)) for stage in shown]
        return tuple(found)


def _edges(steps: Sequence[Alike[DrawnStep]]) -> list[tuple[int, int]]:
    """Return the edges between boxes: (producer, consumer)."""
    maker: dict[Buffer, int] = {}
    found = set()
    box_of = {id(step): k for k, alike in enumerate(steps) for step in alike.members}
    everything = [step for alike in steps for step in alike.members]
    for step in everything:
        maker.update(dict.fromkeys(step.writes, box_of[id(step)]))
    for step in everything:
        here = box_of[id(step)]
        found |= {(maker[b], here) for b in step.reads if b in maker and b not in step.writes}
    return sorted(found)


def _about(step: DrawnStep, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """Return the decisions about a kernel: merges in it, largest gain first, and rejected ones."""
    own = step.buffers
    found = [
        d for d in decisions if own.intersection(d.a.split("+")) or own.intersection(d.b.split("+"))
    ]
    ranked = sorted(found, key=lambda d: (not d.taken, -abs(d.saved_us or 0)))
    return tuple(ranked[:SHOWN_DECISIONS])


def _calls_of(
    alike: Alike[DrawnStep], calls: Sequence[Alike[EagerCall]], layers: Layers
) -> tuple[int, ...]:
    """Return the eager launches that come from the lines of a step.

    Of a line's launches, these are the ones in the step's modules; if there are none, because
    another kernel stores their result, the ones in its layer.
    """
    modules = set(alike.first.modules)
    own_layers = set(map(layers.layer_of, modules))
    found: set[int] = set()
    for line in alike.first.step.origin.source:
        on_line = [
            (k, call.module)
            for k, group in enumerate(calls)
            for call in group.members
            if call.line == line
        ]
        own = {k for k, module in on_line if module in modules or not modules}
        found |= own or {k for k, module in on_line if layers.layer_of(module) in own_layers}
    return tuple(sorted(found))


# -- the graphs of a program that runs -------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Collected(Observer):
    """Graphs that were compiled, each with its id and the options of its compile."""

    graphs: list[tuple[fx.GraphModule, str, Options]] = field(default_factory=list)

    def compiled(self, gm: fx.GraphModule, options: Options, trace: Trace) -> None:
        self.graphs.append((gm, graph_id(trace.name), options))

    def document(self, seen: Seen) -> Document:
        """Return the report of what was collected and seen."""
        staged = [_staged(*one) for one in self.graphs]
        times, layers = _times(seen), seen.layers

        def measured(one: Staged, step: DrawnStep) -> Timing | None:
            what = step.code or (step.computes[0], layers.folded(step.module))
            calls, seconds = times.get((one.name, what), (0, 0.0))
            return Timing(seconds / calls * 1e6, "measured") if calls else None

        targets = ", ".join(dict.fromkeys(one.target.name for one in staged))
        judged = check_known(staged, lambda _: None)
        return document_of(seen.what, targets, staged, seen, judged=judged, measured=measured)


def _staged(graph: fx.GraphModule, name: str, options: Options) -> Staged:
    observed = Observed(name, graph, graph_cost(graph), {})
    try:
        target = target_for(main_device(graph), options)
    except Unsupported as problem:
        return Staged(observed, find_target("cpu"), Trace(name), None, problem.reason)
    made = take_through(observed, target, options)
    if made.failure is None:
        return made
    return Staged(observed, target, made.trace, None, describe_failure(made.failure))  # as it ran


def _times(seen: Seen) -> Mapping[tuple[str, object], tuple[int, float]]:
    """Return (calls, seconds) by (graph, code), and of eager kernels by (graph, (op, module)).

    Launches of one code share its time.
    """

    def kind(launch: Launch) -> tuple[str, object]:
        code = launch.name.partition(":")[0]
        return launch.graph, (launch.name, launch.module) if launch.eager else code

    return {kind(one): (one.calls, one.seconds) for one in summed(seen.launches, kind)}
