"""What fusec made of a model: its kernels, what stays eager and why, bytes and launches, decisions.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "breaks": [as of ``seen.py``], "unseen": where fake tensors ended, or "",
     "graphs": [{
        "name": "forward",
        "kernels": [{"name", "outputs": [buffer], "bytes", "source": [line], "members",
                     "module"}],
        "externs": [{"op", "reason"}],
        "loops": [{"name", "rows", "chunk", "rounds", "bytes", "kernels", "externs", "largest"}],
        "bytes_eager", "bytes_moved", "bytes_floor", "held",
        "launches_eager", "launches",
        "decisions": [{"a", "b", "taken", "reason", "saved_us"}]}]}

Decisions are the merges taken and the rejected ones that still hold; ``saved_us`` is null where a
merge was not legal. A loop runs its kernels and externs, which stand among the others, once for
each chunk of rows; ``largest`` is the largest buffer of its body, in bytes. ``bytes_*`` are defined
in ``traffic.py`` and ``eager.py``. ``held`` is the memory of the graph's constants, in bytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusec.frontend.origin import module_path
from fusec.ir.decision import Decision
from fusec.ir.graph import Bundle, Extern, Kernel, RowLoop, Schedule, all_kernels, all_launches
from fusec.report.breaks import Break, break_lines
from fusec.report.eager import node_costs
from fusec.report.seen import folded
from fusec.report.stages import Staged
from fusec.report.traffic import buffer_bytes, bytes_floor, bytes_moved, row_loop_bytes, step_bytes

SCHEMA = 1
_NUMBER = re.compile(r"_v?\d+")
_LINE = re.compile(r"(.*?):(\d+) in ([^:]*)")
SHOWN_DECISIONS = 12
"""Merges of each kind in the printed form; the JSON form has all."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One launch: the buffers it writes, the bytes it moves, the user's lines it computes.

    Attributes:
        members: how many alike kernels it runs.
        module: where it belongs, "h.3.mlp"; "" for the model itself.
    """

    name: str
    outputs: tuple[str, ...]
    bytes: int
    source: tuple[str, ...]
    members: int = 1
    module: str = ""


@dataclass(frozen=True, slots=True)
class ExternReport:
    """One call of an eager kernel, and why it is not lowered."""

    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoopReport:
    """One loop over chunks of rows: how many, what it moves in all, what one chunk launches."""

    name: str
    rows: int
    chunk: int
    rounds: int
    bytes: int
    kernels: tuple[str, ...]
    externs: tuple[str, ...]
    largest: int

    @property
    def launches(self) -> int:
        return self.rounds * (len(self.kernels) + len(self.externs))


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph; bytes follow from shapes, as ``traffic.py`` and ``eager.py`` say."""

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

    def __str__(self) -> str:
        return "\n".join(_graph_lines(self))


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ``fusec explain`` shows: one entry for each compiled graph.

    Attributes:
        breaks: where Dynamo ended graphs.
        unseen: the line that asks for the value of a tensor that has none; what follows on it was
            not followed.
    """

    target: str
    graphs: tuple[GraphReport, ...]
    breaks: tuple[Break, ...] = ()
    unseen: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form as dictionaries and lists."""
        return {
            "schema": SCHEMA,
            "graphs": [asdict(graph) for graph in self.graphs],
            "breaks": [asdict(one) for one in self.breaks],
            "unseen": self.unseen,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return the JSON form; the module's docstring has its schema."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        if not (self.graphs or self.breaks or self.unseen):
            return "nothing was compiled: the call has no tensor operations"
        parts = [f"target {self.target}", "\n".join(break_lines(self.breaks)), *self.graphs]
        if self.unseen:
            parts.append(
                f"from here on not seen: {self.unseen}\n"
                "  asks for the value of a tensor, which has none here; --run runs the model"
            )
        elif not self.graphs:
            parts.append("nothing is compiled: all of the call runs eagerly")
        return "\n\n".join(filter(None, map(str, parts)))


def report_graph(staged: Staged) -> GraphReport:
    """Return the report of one graph taken through the pipeline.

    Raises:
        Exception: what stopped its compile.
    """
    staged.check()
    eager = staged.observed.eager
    if staged.compiled is None:
        return _report_eager(staged)
    schedule = staged.compiled.schedule
    modules = {node.name: module_path(node) for node in staged.observed.graph.graph.nodes}
    kernels = tuple(_report_kernel(launch, modules) for launch in all_launches(schedule))
    externs = tuple(ExternReport(step.title, step.reason) for step in _externs(schedule))
    loops = tuple(_report_loop(step) for step in schedule.loops)
    launches = sum(step.is_launch for step in schedule.steps) - len(loops)
    return GraphReport(
        staged.name,
        kernels,
        externs,
        eager.bytes,
        bytes_moved(schedule),
        bytes_floor(schedule),
        eager.launches,
        launches + sum(loop.launches for loop in loops),
        _standing(staged.compiled.decisions, schedule),
        loops,
        sum(buffer_bytes(c.buffer) for c in schedule.constants),
    )


def _externs(schedule: Schedule) -> list[Extern]:
    """Return the calls of eager kernels, those inside loops over rows included."""
    found: list[Extern] = []
    for step in schedule.steps:
        match step:
            case RowLoop():
                found.extend(_externs(step.schedule))
            case Extern() if step.is_launch:
                found.append(step)
    return found


def _report_loop(loop: RowLoop) -> LoopReport:
    made = [b for k in all_kernels(loop.schedule) for b in k.writes]
    made += [b for e in _externs(loop.schedule) for b in e.writes]
    return LoopReport(
        loop.name,
        loop.rows.hint(),
        loop.chunk,
        loop.rounds,
        row_loop_bytes(loop),
        tuple(k.name for k in all_kernels(loop.schedule)),
        tuple(e.title for e in _externs(loop.schedule)),
        max(map(buffer_bytes, made), default=0),
    )


def _standing(decisions: Sequence[Decision], schedule: Schedule) -> tuple[Decision, ...]:
    """Return the merges taken, and those rejected that still hold: of two kernels the last reason.

    What was rejected between parts that share a kernel in the end is no news.
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


def _report_kernel(launch: Kernel | Bundle, modules: Mapping[str, str]) -> KernelReport:
    outputs = tuple(dict.fromkeys(buffer.name for buffer in launch.writes))
    source = _in_order(launch.origin.source)
    module = next((modules[name] for name in outputs if modules.get(name)), "")
    return KernelReport(
        launch.name, outputs, step_bytes(launch), source, len(launch.kernels), module
    )


def _in_order(source: Sequence[str]) -> tuple[str, ...]:
    """Return lines of the user's, those of one function together and by their number.

    Definitions that are fused name them by their own order, an expression's innermost part first.
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
        ExternReport(str(node.target).removeprefix("aten."), staged.problem) for node, _ in costs
    )
    moved = sum(size for _, size in costs)
    eager = staged.observed.eager
    return GraphReport(
        staged.name, (), externs, eager.bytes, moved, moved, eager.launches, len(externs), ()
    )


# -- text ----------------------------------------------------------------------------------------


def format_bytes(size: int) -> str:
    """Return a size in powers of ten: ``1.57 MB``."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return rows with their columns aligned, to the right for the columns in ``right``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if position in right else cell.ljust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _graph_lines(graph: GraphReport) -> list[str]:
    rows = [
        ("", "eager", "fusec", "floor"),
        ("launches", str(graph.launches_eager), str(graph.launches), ""),
        ("bytes", *map(format_bytes, (graph.bytes_eager, graph.bytes_moved, graph.bytes_floor))),
    ]
    if graph.held:
        rows.append(("held", "", format_bytes(graph.held), ""))
    lines = [f"graph {graph.name}", *_indent(format_table(rows, right=(1, 2, 3)))]
    if graph.kernels:
        lines += ["", "  kernels", *_indent(_kernel_lines(graph.kernels), 4)]
    for loop in graph.loops:
        lines += ["", *_indent(_loop_lines(loop))]
    if graph.externs:
        lines += ["", "  eager kernels", *_indent(_extern_lines(graph.externs), 4)]
    taken = [d for d in graph.decisions if d.taken]
    rejected = [d for d in graph.decisions if not d.taken]
    saved = sum(d.saved_us or 0 for d in taken)
    if taken:
        title = f"  merges taken: {len(taken)}, modelled to save {saved:.3g} us"
        lines += ["", title, *_indent(_decision_lines(taken), 4)]
    if rejected:
        title = f"  merges rejected: {len(rejected)}"
        lines += ["", title, *_indent(_decision_lines(rejected), 4)]
    return lines


def _loop_lines(loop: LoopReport) -> list[str]:
    count = f"{loop.chunk} of {loop.rows} rows at a time"
    inside = ", ".join((*loop.externs, *loop.kernels))
    return [
        f"loop {loop.name}: {count}, {loop.rounds} times; {format_bytes(loop.bytes)} in all",
        f"  each time: {inside}",
        f"  its largest buffer: {format_bytes(loop.largest)}; what it reads whole, such as weights,"
        " it reads each time",
    ]


def _indent(lines: Sequence[str], columns: int = 2) -> list[str]:
    return [f"{' ' * columns}{line}" for line in lines]


def _kernel_lines(kernels: Sequence[KernelReport]) -> list[str]:
    """Return each kernel with its lines; those of alike layers are one, with their number."""
    alike: dict[object, list[KernelReport]] = {}
    for kernel in kernels:
        outputs = tuple(map(_without_number, kernel.outputs))
        key = (kernel.bytes, kernel.source, kernel.members, folded(kernel.module), outputs)
        alike.setdefault(key, []).append(kernel)
    rows = [
        (k.name, format_bytes(k.bytes), _written(k, len(group))) for k, *group in alike.values()
    ]
    lines: list[str] = []
    for (kernel, *_), line in zip(alike.values(), format_table(rows, right=(1,)), strict=True):
        lines += [line, *_indent(kernel.source, 6)]
    return lines


def _written(kernel: KernelReport, more: int) -> str:
    alike = f"{kernel.members} alike: " if kernel.members > 1 else ""
    where = f" in {folded(kernel.module)}" if kernel.module else ""
    layers = f"{more + 1} times{where}: " if more else ""
    return layers + alike + _shorten(", ".join(kernel.outputs))


def _without_number(name: str) -> str:
    """Return a name without what tells it from alike ones: "var_mean" for "var_mean_12"."""
    return _NUMBER.sub("", name)


def _extern_lines(externs: Sequence[ExternReport]) -> list[str]:
    counted = Counter(externs)
    return format_table([(f"{n} x", e.op, e.reason) for e, n in counted.items()], right=(0,))


def _decision_lines(decisions: Sequence[Decision]) -> list[str]:
    """Return merges, the dearest first; those of alike layers are one, with their number."""
    ranked = sorted(decisions, key=lambda d: -abs(d.saved_us or 0))
    alike: dict[object, list[Decision]] = {}
    for decision in ranked:
        alike.setdefault(_decision_kind(decision), []).append(decision)
    groups = list(alike.values())[:SHOWN_DECISIONS]
    rows = [
        (
            _shorten(d.a),
            "with",
            _shorten(d.b),
            _price(d.saved_us),
            f"{d.reason}, {len(more) + 1} times" if more else d.reason,
        )
        for d, *more in groups
    ]
    lines = format_table(rows, right=(3,))
    shown = sum(map(len, groups))
    if len(ranked) > shown:
        lines.append(f"and {len(ranked) - shown} more, which --json lists")
    return lines


def _decision_kind(decision: Decision) -> object:
    """Return what merges of alike layers have in common."""
    names = [_without_number(part) for part in f"{decision.a}+{decision.b}".split("+")]
    return tuple(names), _price(decision.saved_us), decision.reason


def _price(saved_us: float | None) -> str:
    return "" if saved_us is None else f"{saved_us:+.3g} us"


def _shorten(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
