"""Report on a compiled model: its kernels, what stays eager and why, bytes, launches, decisions.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "breaks": [as of ``run_report.py``], "recompiles": [as there],
     "unseen": where fake tensors ended, or "",
     "outside": [{"op", "place", "reason"}],
     "graphs": [{
        "name": "forward",
        "kernels": [{"name", "outputs": [buffer], "bytes", "source": [line], "members",
                     "module", "expected": {"us", "floor_us", "cause"} or null,
                     "function"}],
        "externs": [{"op", "reason", "module", "bytes"}],
        "loops": [{"name", "rows", "chunk", "rounds", "bytes", "kernels", "externs", "largest",
                   "native"}],
        "bytes_eager", "bytes_moved", "bytes_floor", "held",
        "launches_eager", "launches", "remarks": [text], "modules": {path: class},
        "called", "sums": [{"kernel", "over": [axis], "sizes": [size], "added"}],
        "passes": [{"name", "rewritten", "lines"}],
        "decisions": [{"a", "b", "taken", "reason", "saved_us", "against"}]}]}

Decisions are the merges taken and the rejected ones that still hold, and choices between two
candidates, ``b`` and ``against``; ``saved_us`` is null where a merge was not legal. A loop runs its
kernels and externs, which are also among the others, once for each chunk of rows; ``largest`` is
the largest buffer of its body, in bytes. One that is ``native`` runs in one call, in which
``launches`` counts its kernels once; it also counts each fill with zeros of a buffer that a step
adds to. ``bytes_*`` are defined in ``traffic.py`` and ``eager_cost.py``. ``held`` is the memory of
the graph's constants, in bytes. ``expected`` is the estimate of ``kernel_time.py`` from a kernel's
machine code, if that was requested. ``passes`` are the user's (``fusec.register_pass``), with the
lines of the graph that each has written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from torch import fx

from fusec.codegen.parametrize import describe_call
from fusec.codegen.targets import Target
from fusec.driver.pipeline import Compiled
from fusec.frontend.modules import kernel_modules, module_kinds
from fusec.frontend.origin import module_path
from fusec.ir.decision import Decision
from fusec.ir.definition import by_name
from fusec.ir.graph import (
    ForeachKernel,
    Kernel,
    RowLoop,
    Schedule,
    all_kernels,
    all_launches,
    launched_externs,
)
from fusec.ir.host import HostLoop
from fusec.ir.index import Axis
from fusec.ir.machine import Machine
from fusec.ir.memory import added_to
from fusec.ir.sum_order import axes_of_terms, sizes_of_sums
from fusec.passes.schedule.plan import LoopKind, Plan
from fusec.tools.report.breaks import Break, Recompile
from fusec.tools.report.eager_cost import node_costs
from fusec.tools.report.kernel_time import Expectation
from fusec.tools.report.stages import Staged
from fusec.tools.report.traffic import (
    buffer_bytes,
    bytes_floor,
    bytes_moved,
    extern_bytes,
    row_loop_bytes,
    step_bytes,
)
from fusec.tools.terminal import Report, format_us

_LAUNCH_BOUND = 2.0
"""A graph is launch-bound if launching takes so many times as long as moving its bytes."""
_LINE = re.compile(r"(.*?):(\d+) in ([^:]*)")


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One launch: the buffers it writes, the bytes it moves, the user's lines it computes.

    Attributes:
        members: how many kernels of one form it runs.
        module: that it belongs to, "h.3.mlp"; "" for the model itself.
        expected: its time by its machine code; None if not requested, or not modelled.
        function: "the function of k3, with n = 5 for 3"; "" for a kernel with its own function.
    """

    name: str
    outputs: tuple[str, ...]
    bytes: int
    source: tuple[str, ...]
    members: int = 1
    module: str = ""
    expected: Expectation | None = None
    function: str = ""


@dataclass(frozen=True, slots=True)
class ExternReport:
    """One call of an eager kernel, why it is not lowered, and the module that it belongs to."""

    op: str
    reason: str
    module: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class SumReport:
    """What the order of a kernel's sums depends on.

    Attributes:
        over: the axes that it reduces, with their extents: "k:768"; if ``added``, those on the
            grid, for the others are summed in order.
        sizes: the symbolic sizes that change the order.
        added: the order changes from call to call: programs add parts of a sum to memory.
    """

    kernel: str
    over: tuple[str, ...]
    sizes: tuple[str, ...]
    added: bool = False


@dataclass(frozen=True, slots=True)
class LoopReport:
    """One loop over chunks of rows: how many, what it moves in all, what one chunk launches.

    Attributes:
        rows: 0 for a loop that a condition ends, of which one iteration counts.
        native: one native call runs it, so that its kernels are launched once.
    """

    name: str
    rows: int
    chunk: int
    rounds: int
    bytes: int
    kernels: tuple[str, ...]
    externs: tuple[str, ...]
    largest: int
    native: bool = False

    @property
    def launches(self) -> int:
        return (1 if self.native else self.rounds) * (len(self.kernels) + len(self.externs))


@dataclass(frozen=True, slots=True)
class PassReport:
    """A pass of the user: how many of the graph's lines it has written or rewritten."""

    name: str
    rewritten: int
    lines: int


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph; bytes follow from shapes, as ``traffic.py`` and ``eager_cost.py`` say.

    Attributes:
        remarks: launches that overlap, and where it is worse than eager, or bound by launches.
        modules: path -> class of the modules that its nodes are in.
        called: the module that it is a part of, with a graph break before or in it: "h.3 (Block)".
        sums: the order of sums that programs add to memory; under ``deterministic`` and
            ``batch_invariant``, which have none of these, of all sums where sizes are symbolic.
        passes: of the user, in their order.
    """

    name: str
    kernels: tuple[KernelReport, ...]
    externs: tuple[ExternReport, ...]
    bytes_eager: int
    bytes_moved: int
    bytes_floor: int
    launches_eager: int
    launches: int
    decisions: tuple[Decision, ...]
    loops: tuple[LoopReport, ...] = ()
    held: int = 0
    remarks: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    called: str = ""
    sums: tuple[SumReport, ...] = ()
    passes: tuple[PassReport, ...] = ()

    def __str__(self) -> str:
        # Local: the text reads this module.
        from fusec.tools.report.explanation_text import graph_text

        return graph_text(self)


@dataclass(frozen=True, slots=True)
class OutsideReport:
    """An operation between compiled graphs, which PyTorch runs, and the function that it is in."""

    op: str
    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation(Report):
    """What ``fusec explain`` shows: one entry for each compiled graph.

    Attributes:
        breaks: where Dynamo ended graphs.
        recompiles: which functions the call has Dynamo compile more than once.
        unseen: the line that reads the value of a tensor without values; the rest of the call was
            not traced.
        outside: what PyTorch runs between graphs, for AOTAutograd does not trace it, and graphs
            that must run uncompiled.
    """

    target: str
    graphs: tuple[GraphReport, ...]
    breaks: tuple[Break, ...] = ()
    unseen: str = ""
    recompiles: tuple[Recompile, ...] = ()
    outside: tuple[OutsideReport, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "graphs": [asdict(graph) for graph in self.graphs],
            "breaks": [asdict(one) for one in self.breaks],
            "recompiles": [asdict(one) for one in self.recompiles],
            "outside": [asdict(one) for one in self.outside],
            "unseen": self.unseen,
        }

    def text(self, *, whole: bool = False) -> str:
        # Local: as above.
        from fusec.tools.report.explanation_text import explanation_text

        return explanation_text(self)


Expected: TypeAlias = Mapping[tuple[str, str], Expectation | None]
"""Times by machine code: by the names of a graph and of its kernel."""


def report_graph(staged: Staged, expected: Expected | None = None) -> GraphReport:
    """Return the report of one graph taken through the pipeline.

    Raises:
        Exception: what stopped its compile.
    """
    staged.check()
    eager = staged.observed.eager
    if staged.compiled is None:
        return _report_eager(staged)
    schedule = staged.compiled.schedule
    graph = staged.observed.graph
    nodes = {node.name: node for node in graph.graph.nodes}
    modules = modules_of(schedule, graph)
    kernels = tuple(
        _report_kernel(launch, modules[launch.name], staged, expected or {})
        for launch in all_launches(schedule)
    )
    externs = tuple(
        ExternReport(
            on_target(staged.target, step.title),
            step.reason,
            module_path(nodes[step.node]) if step.node in nodes else "",
            extern_bytes(step),
        )
        for step in launched_externs(schedule)
    )
    runs = (s for s in staged.compiled.host.statements if isinstance(s, HostLoop) and s.native)
    native = {run.loop for run in runs}
    loops = tuple(
        _report_loop(step, staged.target.machine, native=step in native) for step in schedule.loops
    )
    launches = sum(step.is_launch + len(added_to(step)) for step in schedule.steps) - len(loops)
    report = GraphReport(
        staged.name,
        kernels,
        externs,
        eager.bytes,
        bytes_moved(schedule, staged.target.machine),
        bytes_floor(schedule),
        eager.launches,
        launches + sum(loop.launches for loop in loops),
        tuple(
            _decision_on(staged.target, d) for d in _standing(staged.compiled.decisions, schedule)
        ),
        loops,
        sum(buffer_bytes(c.buffer) for c in schedule.constants),
        modules=module_kinds(graph),
        called=staged.observed.called,
        sums=tuple(_report_sums(staged.compiled, by_rule=staged.by_rule)),
        passes=tuple(
            PassReport(name, rewritten, len(staged.records[name].structure.nodes))
            for name, rewritten in staged.trace.passes.items()
        ),
    )
    remarks = (*_overlap(staged.compiled), *_remarks(report, staged.target.machine))
    return replace(report, remarks=remarks)


def modules_of(schedule: Schedule, graph: fx.GraphModule) -> dict[str, str]:
    """Return the module that each kernel belongs to."""
    stored = {launch.name: [b.name for b in launch.writes] for launch in all_launches(schedule)}
    return kernel_modules(graph, stored, [step.node for step in launched_externs(schedule)])


def on_target(target: Target, name: str) -> str:
    """Return a name without the device that the graph was traced on, if the target is another."""
    return name.replace(_TRACED, "_attention") if target.assembly else name


_TRACED = "_flash_attention_for_cpu"
"""The name of attention where tensors are on CPUs."""


def _decision_on(target: Target, made: Decision) -> Decision:
    """Return a decision with names that do not have the device that the graph was traced on."""
    a, b, reason, against = (
        on_target(target, name) for name in (made.a, made.b, made.reason, made.against)
    )
    return replace(made, a=a, b=b, reason=reason, against=against)


def _overlap(compiled: Compiled) -> Iterator[str]:
    """Yield how many kernels may start while the launch before them ends, if any may."""
    launches = [compiled.programs[one.name] for one in all_launches(compiled.schedule)]
    if count := sum(program.dependent for program in launches):
        yield f"{count} of {len(launches)} kernels may start while the launch before them ends"


def _remarks(graph: GraphReport, machine: Machine) -> Iterator[str]:
    """Yield a remark for each measure that is worse than eager's, and if launches dominate."""
    if graph.launches > graph.launches_eager > 0:
        yield f"{graph.launches} launches, eager has {graph.launches_eager}"
    if graph.bytes_moved > graph.bytes_eager > 0:
        more = graph.bytes_moved / graph.bytes_eager
        yield f"moves {more:.3g} times the bytes that eager moves"
    moving = graph.bytes_moved / machine.bytes_per_us
    launching = graph.launches * machine.launch_us
    if launching > _LAUNCH_BOUND * moving and not graph.externs:
        yield (
            f"launch-bound: launching takes some {format_us(launching)}, moving the bytes "
            f"{format_us(moving)}: larger batches, or fewer calls, gain more than fusion"
        )


def _report_loop(loop: RowLoop, machine: Machine, *, native: bool) -> LoopReport:
    made = [b for k in all_kernels(loop.schedule) for b in k.writes]
    made += [b for e in launched_externs(loop.schedule) for b in e.writes]
    return LoopReport(
        loop.name,
        0 if loop.while_true else loop.rows.hint(),
        loop.chunk,
        loop.rounds,
        row_loop_bytes(loop, machine),
        tuple(k.name for k in all_kernels(loop.schedule)),
        tuple(e.title for e in launched_externs(loop.schedule)),
        max(map(buffer_bytes, made), default=0),
        native,
    )


def _standing(decisions: Sequence[Decision], schedule: Schedule) -> tuple[Decision, ...]:
    """Return the merges taken, and for each two kernels the last rejected one.

    Rejected merges of definitions that share a kernel in the end are left out.
    """
    kernel_of = {
        buffer.name: step.name
        for step in all_kernels(schedule)
        for buffer in (*step.defs, *(store.buffer.base for store in step.stores))
    }
    kept: dict[object, Decision] = {}
    for number, decision in enumerate(decisions):
        names = (*decision.a.split("+"), *decision.b.split("+"))
        places = frozenset(kernel_of.get(name, name) for name in names)
        if decision.taken:
            kept[number] = decision
        elif len(places) > 1:
            kept.pop(places, None)
            kept[places] = decision
    return tuple(kept.values())


def _report_kernel(
    launch: Kernel | ForeachKernel, module: str, staged: Staged, expected: Expected
) -> KernelReport:
    assert staged.compiled is not None
    written, names = dict.fromkeys(b.name for b in launch.writes), staged.observed.names
    return KernelReport(
        launch.name,
        tuple(on_target(staged.target, names.get(name, name)) for name in written),
        step_bytes(launch, staged.target.machine),
        _in_order(launch.origin.source),
        len(launch.kernels),
        module,
        expected.get((staged.name, launch.name)),
        _function(staged.compiled, launch.name),
    )


def _report_sums(compiled: Compiled, *, by_rule: bool) -> Iterator[SumReport]:
    """Yield what the order of sums depends on, for each kernel where it depends on anything.

    Args:
        by_rule: all kernels of a graph with symbolic sizes.
    """
    sized = by_rule and any(program.sizes for program in compiled.programs.values())
    for launch in all_launches(compiled.schedule):
        axes, program = axes_of_terms(launch.kernels), compiled.programs[launch.name]
        if program.added or (sized and axes):
            sizes = by_name(sizes_of_sums(program)) if sized else ()
            if program.added:
                axes = axes_of_additions(launch.kernels, compiled.plans[launch.name])
            over = tuple(f"{axis.name}:{axis.extent}" for axis in axes)
            names = tuple(size.name for size in sizes)
            yield SumReport(launch.name, over, names, bool(program.added))


def axes_of_additions(kernels: Iterable[Kernel], plan: Plan) -> tuple[Axis, ...]:
    """Return the axes on the grid along which kernels add to memory (``Store.adds``)."""
    adding = [kernel for kernel in kernels if any(store.adds for store in kernel.stores)]
    grid = {binding.axis for binding in plan.bindings if binding.kind is LoopKind.GRID}
    return tuple(axis for axis in axes_of_terms(adding) if axis in grid)


def _function(compiled: Compiled, kernel: str) -> str:
    """Describe the function of another kernel that one runs, and its parameter; "" if its own."""
    program = compiled.code[kernel]
    call = compiled.functions.calls[program]
    return "" if call.function == program else describe_call(compiled.functions, program)


def _in_order(source: Sequence[str]) -> tuple[str, ...]:
    """Return the user's lines, grouped by function and sorted by number.

    Fused definitions have them in their own order, an expression's innermost part first.
    """
    functions: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for line in source:
        found = _LINE.match(line)
        place, number = (found.group(1, 3), int(found[2])) if found else ((line,), 0)
        functions.setdefault(place, []).append((number, line))
    return tuple(line for lines in functions.values() for _, line in sorted(lines))


def _report_eager(staged: Staged) -> GraphReport:
    """Report a graph of which nothing was lowered: every operation is an extern."""
    costs = node_costs(staged.observed.graph)
    externs = tuple(
        ExternReport(
            str(node.target).removeprefix("aten."), staged.problem, module_path(node), moved
        )
        for node, moved in costs
    )
    moved = sum(size for _, size in costs)
    eager = staged.observed.eager
    return GraphReport(
        staged.name, (), externs, eager.bytes, moved, moved, eager.launches, len(externs), ()
    )
