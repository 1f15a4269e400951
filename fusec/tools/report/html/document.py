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
from fusec.ir.graph import Extern, ForeachKernel, Kernel
from fusec.ir.names import operation_words
from fusec.options import Options
from fusec.passes.schedule.plan import print_plan
from fusec.tools.report.breaks import Break, Recompile
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
from fusec.tools.report.run_report import Seen
from fusec.tools.report.stages import Staged, take_through
from fusec.tools.report.static_report import LintReport, judge_known
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
class Call:
    """The eager launches of one operation in repeated modules; bytes are of all of them."""

    op: str
    count: int
    bytes: int
    module: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """One graph.

    Attributes:
        problem: why all of it runs as eager kernels, or "".
    """

    report: GraphReport
    problem: str
    boxes: tuple[Box, ...]
    calls: tuple[Call, ...]
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
        phases: phase of compiles -> seconds.
        advice: what to do, costliest first.
        seconds, run_seconds: of the program, where one ran, and of them in graphs.
    """

    title: str
    target: str
    graphs: tuple[Drawing, ...]
    texts: tuple[str, ...]
    breaks: tuple[Break, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    unseen: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    seconds: float = 0.0
    run_seconds: float = 0.0
    peak_bytes: int = 0

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
    judged: LintReport | None = None,
    measured: Measured = lambda staged, step: None,
) -> Document:
    """Return the report of some graphs.

    Args:
        judged: the facts of their machine code.
        measured: returns the measured time of a launch, if any.
    """
    texts = _Texts()
    layers = Layers.of(*(module_kinds(one.observed.graph) for one in staged))
    drawings = tuple(_Drawer(one, texts, judged, measured, layers).drawing() for one in staged)
    phases = dict(seen.compile_seconds)
    for one in staged:
        for stage, seconds in one.trace.wall_seconds.items():
            name = f"fusec: {stage}"
            if not seen.graphs:  # after a run, ``seen`` has them
                phases[name] = phases.get(name, 0.0) + seconds
    return Document(
        title,
        target,
        drawings,
        tuple(texts.numbers),
        seen.breaks,
        seen.recompiles,
        seen.unseen,
        phases | ({"machine code": judged.seconds} if judged else {}),
        tuple(seen.advice()) if seen.graphs else (),
        seen.seconds if seen.graphs else 0.0,
        seen.run_seconds,
        seen.peak_bytes if seen.graphs else 0,
    )


class _Texts:
    """Texts by their number, each once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def listing(self, label: str, content: str) -> Listing:
        return Listing(label, self.numbers.setdefault(content, len(self.numbers)))


class _Drawer:
    """Draws one graph."""

    def __init__(
        self,
        staged: Staged,
        texts: _Texts,
        judged: LintReport | None,
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
            tuple(map(_call, self.calls)),
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
            kind=_kind(step),
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
        found = [self.texts.listing("Notation", text.print_step(step.step))]
        if compiled is None or not step.is_kernel:
            return tuple(found)
        plan = print_plan(step.name, compiled.plans[step.name])
        label = LANGUAGES[self.staged.target.language]
        found += [
            self.texts.listing("Schedule", plan.replace("    ", "\n    ")),
            self.texts.listing(label, compiled.sources[step.name]),
        ]
        code = None if checked is None else checked.assembly
        if code is not None:
            shown = [stage for stage in code.stages if stage in STAGES]
            found += [self.texts.listing(STAGES[stage], code.text(stage)) for stage in shown]
        return tuple(found)


def _kind(step: DrawnStep) -> str:
    match step.step:
        case Kernel():
            return "kernel"
        case ForeachKernel():
            return "foreach"
        case Extern():
            return "library"


def _call(alike: Alike[EagerCall]) -> Call:
    members = alike.members
    return Call(
        operation_words([alike.first.op])[0],
        alike.count,
        sum(call.bytes for call in members),
        alike.module,
        tuple(dict.fromkeys(call.line for call in members)),
    )


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
        judged = judge_known(staged, lambda _: None)
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
    found: dict[tuple[str, object], tuple[int, float]] = {}
    for launch in seen.launches:
        code = launch.name.partition(":")[0]
        key = launch.graph, ((launch.name, launch.module) if launch.eager else code)
        calls, seconds = found.get(key, (0, 0.0))
        found[key] = calls + launch.calls, seconds + launch.seconds
    return found
