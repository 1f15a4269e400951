"""The record of a program that ran, which ``run``, ``watch`` and ``explain`` read, and its page.

The page of ``fusec run`` has advice first, then the facts that it follows from. Advice is on the
costs that were seen, the largest share of the program's time first. All costs have one unit, the
share of the program's time without its compiles. A graph's share is measured; a graph break, or a
graph that runs eagerly, costs at most the time outside of fusec's graphs. A cost of compiling
occurs once and comes last. A cost without a remedy is no advice, and a recompile because the
program does two things (it trains, it evaluates) is a note.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "what", "seconds", "compile_seconds": {phase: seconds}, "peak_bytes", "unseen",
     "advice": [text], "unmended": [text], "notes": [text],
     "collections", "collection_seconds", "compared": [{"compile", "fusec_us", "eager_us"}],
     "breaks": [{"place": {"path", "line", "function", "code"}, "reason", "skipped", "count",
                 "remedy": {"change", "setting", "meant"}}],
     "recompiles": [{"place", "reason", "remedy", "seconds", "count"}],
     "graphs": [{"compile", "name", "target", "cached", "problem", "seconds": {stage: seconds},
                 "kernels": [{"name", "code", "ops", "module", "source", "bytes",
                              "multiplied": {type: n}, "us"}],
                 "externs": [{"name", "op", "reason", "module", "source", "bytes",
                              "multiplied": {type: n}, "us"}],
                 "modules": {path: class}, "called", "reason", "outside", "place", "calls",
                 "run_seconds"}],
     "launches": [{"graph", "name", "module", "eager", "reason", "calls", "seconds"}]}

Seconds are of the wall clock. ``seconds`` of a launch are null where they were not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fusec.tools.report.breaks import Break, Place, Recompile, Remedy, item_lines
from fusec.tools.report.layers import Layers
from fusec.tools.report.run_script import Compared
from fusec.tools.summary import GraphSummary
from fusec.tools.terminal import (
    Report,
    alike,
    columns,
    fitted_table,
    format_bytes,
    format_seconds,
    format_table,
    format_us,
    indented,
    tail,
    wrapped,
)

# -- the record ------------------------------------------------------------------------------------


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
class Seen(Report):
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
        """Return remedies, that of the largest share of the time first."""
        return [str(one) for one in advice_on(self) if one.helps]

    def unmended(self) -> list[str]:
        """Return the costs of time without a known remedy."""
        return [str(one) for one in advice_on(self) if not (one.helps or one.remedy.meant)]

    def notes(self) -> list[str]:
        """Return the recompiles that the program needs, as it does two things: a line each."""
        found = [one for one in advice_on(self) if one.remedy.meant]
        whys = (one.remedy.change.partition(": ")[2] for one in found)
        return [f"{n.place}: {n.seconds:.1f} s more: {w}" for n, w in zip(found, whys, strict=True)]

    def by_module(self) -> list[tuple[str, float, int]]:
        """Return (module, seconds, calls) of what graphs launched, the slowest first."""
        rows = summed(self.launches, lambda one: one.module)
        return [(row.module, row.seconds, row.calls) for row in rows]

    def slowest(self, *, eager: bool) -> list[Launch]:
        """Return a graph's kernels of one code, or all its eager kernels of one name, as one.

        They are those of one module; the slowest come first.
        """
        own = (one for one in self.launches if one.eager == eager)
        own = (replace(one, graph="") for one in own) if eager else own
        return summed(own, lambda one: (one.graph, one.name, one.module))

    def to_dict(self) -> dict[str, Any]:
        document = {**asdict(self), "advice": self.advice()}
        document |= {"unmended": self.unmended(), "notes": self.notes()}
        for graph in document["graphs"]:
            graph |= graph.pop("summary")
        return document

    def text(self, *, whole: bool = False) -> str:
        return page(self)


def summed(launches: Iterable[Launch], kind: Callable[[Launch], object]) -> list[Launch]:
    """Return the sums of launches of each kind, the slowest first."""
    rows = (
        replace(some[0], calls=sum(o.calls for o in some), seconds=sum(o.seconds for o in some))
        for some in alike(launches, kind)
    )
    return sorted(rows, key=lambda row: -row.seconds)


# -- advice ----------------------------------------------------------------------------------------


_SLOW_SHARE = 0.1
"""The share of a program's time in graphs above which an eager kernel is worth a line of advice."""
_LOST_SHARE = 0.02
"""The share of a program's time above which a graph's loss to eager is worth a line."""
_LAUNCH_US = 10.0
"""Microseconds that a launch may take, the host's part included."""
_MANY_CALLS = 100
_MORE_PLACES = 4
"""Lines that are named beside the first one."""
_COLLECT_LESS = (
    "gc.collect() and then gc.freeze() behind the first step: what a compile made is no garbage"
)
_EAGER_REMEDIES = {
    "random numbers: eager's stream": "leave fallback_random out: fusec's own numbers are drawn "
    "inside of kernels",
    "depends on data": "keep the shape: torch.where(mask, x, 0) in place of x[mask]",
}
"""Part of a reason why an eager kernel is called -> what to do about it."""


NONE = "none"
"""The first word of a remedy's text where there is no remedy."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One cost in a program, and its remedy.

    Attributes:
        place: the user's line, or the graph.
        said: what happens there.
        remedy: what to do about it; its text begins with "none" where there is nothing to do.
        share: of the time without compiles.
        bound: the share is an upper bound.
        seconds: of compiling, once.
    """

    place: str
    said: str
    remedy: Remedy
    share: float = 0.0
    bound: bool = False
    seconds: float = 0.0

    @property
    def cost(self) -> str:
        """The share of the time, or "once"."""
        if not self.share:
            return "once"
        return f"{'at most ' if self.bound else ''}{self.share:.0%} of the time"

    @property
    def helps(self) -> bool:
        """Whether there is something to do."""
        return not self.remedy.change.startswith(NONE)

    def __str__(self) -> str:
        return f"{self.place}\n{self.cost}: {self.said}\n-> {self.remedy}"


def advice_on(seen: Seen) -> list[Advice]:
    """Return advice on all costs, the largest share first."""
    parts = (_fallbacks, _breaks, _recompiles, _collections, _externs, _losing, _launch_bound)
    found = [one for part in parts for one in part(seen)]
    return sorted(found, key=lambda one: (-one.share, -one.seconds))


def _running(seen: Seen) -> float:
    """Return the program's seconds without its compiles."""
    return max(seen.seconds - sum(seen.compile_seconds.values()), seen.run_seconds, 1e-9)


def _elsewhere(seen: Seen) -> float:
    """Return the share of the time that is outside of fusec's graphs."""
    return 1.0 - seen.run_seconds / _running(seen)


def _fallbacks(seen: Seen) -> Iterator[Advice]:
    failed = [graph for graph in seen.graphs if graph.summary.problem]
    for some in alike(failed, lambda graph: graph.summary.problem):
        graph, *others = some
        more = f" and {len(others)} more run" if others else " runs"
        said = f"graph {graph.summary.id}{more} as eager kernels: {graph.summary.problem}"
        share = sum(one.run_seconds for one in some) / _running(seen)
        place, remedy = _places(map(_place, some)), Remedy(_bisected(seen, graph))
        yield Advice(place, said, remedy, share or _elsewhere(seen), bound=not share)


def _places(places: Iterable[str]) -> str:
    """Return the first of some places, and the lines of the others."""
    first, *others = dict.fromkeys(places)
    if not others:
        return first
    lines = [other.partition(" in ")[0] for other in others]
    more = f" and {len(lines) - _MORE_PLACES} more" if len(lines) > _MORE_PLACES else ""
    return f"{first}; also {', '.join(lines[:_MORE_PLACES])}{more}"


def _place(graph: SeenGraph) -> str:
    return str(graph.place) if graph.place.path else f"graph {graph.summary.id}"


def _breaks(seen: Seen) -> Iterator[Advice]:
    ranked = sorted(seen.breaks, key=lambda b: (not b.skipped, -b.count))
    for some in alike(ranked, lambda b: (b.reason, str(b.remedy), b.skipped)):
        one, place = some[0], _places(str(b.place) for b in some)
        yield Advice(place, one.said, one.remedy, _elsewhere(seen), bound=True)


def _recompiles(seen: Seen) -> Iterator[Advice]:
    for some in alike(seen.recompiles, lambda r: (r.kind, str(r.remedy))):
        seconds, count = sum(r.seconds for r in some), sum(r.count for r in some)
        one = replace(some[0], seconds=seconds, count=count)
        place = _places(str(r.place) for r in some)
        yield Advice(place, one.said, one.remedy, seconds=seconds)


def _collections(seen: Seen) -> Iterator[Advice]:
    share = seen.collection_seconds / _running(seen)
    if share > _SLOW_SHARE:
        said = f"Python collects garbage {seen.collections} times"
        yield Advice("no line of yours", said, Remedy(_COLLECT_LESS), share)


def _externs(seen: Seen) -> Iterator[Advice]:
    for launch in seen.slowest(eager=True):
        remedy = next((r for part, r in _EAGER_REMEDIES.items() if part in launch.reason), None)
        if remedy is not None and launch.seconds > _SLOW_SHARE * seen.run_seconds:
            where = f"{launch.name}{f' of {launch.module}' if launch.module else ''}"
            share = launch.seconds / _running(seen)
            yield Advice(where, f"an eager kernel: {launch.reason}", Remedy(remedy), share)


def _losing(seen: Seen) -> Iterator[Advice]:
    graphs = {graph.summary.compile: graph for graph in reversed(seen.graphs)}  # the forward's
    for one in seen.compared:
        graph = graphs.get(one.compile)
        if graph is not None and one.loses:
            lost_us, what = one.fusec_us - one.eager_us, f"graph {graph.summary.id}"
            ours, theirs = format_us(one.fusec_us), format_us(one.eager_us)
            said = f"{what} takes {ours} a call, eagerly {theirs}"
            share = graph.calls * lost_us / 1e6 / _running(seen)
            remedy = (
                "leave this one eager: call the model itself, without torch.compile, or put "
                f"@torch.compiler.disable on {graph.place.function or 'its function'}"
            )
            if share > _LOST_SHARE:
                yield Advice(_place(graph), said, Remedy(remedy), share)


def _launch_bound(seen: Seen) -> Iterator[Advice]:
    for graph in seen.graphs:
        share = graph.run_seconds / _running(seen)
        launches = len(graph.summary.kernels) + len(graph.summary.externs)
        if graph.summary.problem or graph.calls < _MANY_CALLS or not launches:
            continue
        each = graph.run_seconds / graph.calls * 1e6
        short = each / launches < _LAUNCH_US
        if short and graph.run_seconds > _SLOW_SHARE * seen.seconds:
            said = (
                f"graph {graph.summary.id} is launch-bound: {launches} "
                f"launch{'es' * (launches != 1)} in {each:.3g} us a call"
            )
            remedy = 'larger batches, or fewer calls; on a GPU, mode="reduce-overhead"'
            yield Advice(_place(graph), said, Remedy(remedy), share)


def _bisected(seen: Seen, graph: SeenGraph) -> str:
    """Return the command that finds the defect behind a failed compile."""
    if graph.summary.reason:
        return f"{NONE} is known"
    program = seen.what if seen.what.endswith(".py") else "SCRIPT"
    return f"fusec bisect --crash {program}, which ends with a file for a bug report"


# -- the page --------------------------------------------------------------------------------------


LINES = 56
"""The most lines of a page, which need little scrolling."""
_ROWS = range(12, 2, -1)
"""Rows of a table, from the most to the fewest that are tried; the JSON form has all."""
_LEAST_PLACE = 32
"""The least width of a table's column for a line of the user's program."""


def page(seen: Seen) -> str:
    """Return a record as text, with as many rows of each table as fit on a page."""
    pages = (_page(seen, rows) for rows in _ROWS)
    shown: list[str] = []
    for shown in pages:
        if len(shown) <= LINES:
            break
    return "\n".join(shown)


def _page(seen: Seen, rows: int) -> list[str]:
    """Return a page's lines, with some rows of each table at most."""
    advice = advice_on(seen)
    left = [one for one in advice if not (one.helps or one.remedy.meant)]
    sections = [
        _paragraphs(f"do this first: {_counted(seen)}", [one for one in advice if one.helps], rows),
        _paragraphs("without a remedy", left, rows // 2),
        _notes(seen.notes(), rows // 2),
        _graphs(seen.graphs, rows),
        _modules(seen, rows),
        _kernels(seen.slowest(eager=False), rows),
        _eager_kernels(seen.slowest(eager=True), rows),
        _compiles(seen),
    ]
    lines = [_head(seen)]
    for section in sections:
        lines += ["", *section] if section else []
    return lines


def _head(seen: Seen) -> str:
    compiling = sum(seen.compile_seconds.values())
    rest = max(seen.seconds - compiling - seen.run_seconds, 0.0)
    said = f": {format_seconds(seen.seconds)}"
    if not seen.graphs and not seen.breaks:
        said += "; nothing was compiled"
    else:
        said += (
            f": compile {format_seconds(compiling)}, graphs {format_seconds(seen.run_seconds)}, "
            f"else {format_seconds(rest)}; peak {format_bytes(seen.peak_bytes)}"
        )
    return f"{tail(seen.what, columns() - len(said))}{said}"


def _paragraphs(title: str, advice: Sequence[Advice], rows: int) -> list[str]:
    """Return some advice as numbered paragraphs."""
    lines = [title] if advice else []
    for number, one in enumerate(advice[:rows], 1):
        lines += item_lines(f"{number}.", one.place, f"{one.cost}: {one.said}", one.remedy)
    return [*lines, *_more(len(advice), rows)]


def _notes(notes: Sequence[str], rows: int) -> list[str]:
    """Return the recompiles that the program needs."""
    lines = ["compiled again, as it has to be"] if notes else []
    for text in notes[:rows]:
        lines += wrapped(text, "  ", "    ")
    return [*lines, *_more(len(notes), rows)]


def _counted(seen: Seen) -> str:
    again = sum(one.count for one in seen.recompiles if not one.remedy.meant)
    counts = {
        "graph break": len(seen.breaks),
        "recompile": again,
        "fallback": sum(bool(graph.summary.problem) for graph in seen.graphs),
    }
    said = [f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items() if n]
    return ", ".join(said) or "what takes long"


def _graphs(graphs: Sequence[SeenGraph], most: int) -> list[str]:
    if not graphs:
        return []
    called = {g.summary.compile: g.summary.called for g in graphs if g.summary.called}
    rows: list[Sequence[str]] = [
        ("", "graph", "kernels", "eager", "calls", "time", "compile", "of")
    ]
    dear = sorted(graphs, key=lambda g: (not g.summary.problem, -g.run_seconds))[:most]
    rows += [_graph_row(graph, called) for graph in graphs if graph in dear]
    hits = sum(graph.summary.cached for graph in graphs)
    title = f"graphs: {len(graphs)}, {hits} from the cache"
    return [title, *_graph_table(rows), *_more(len(graphs), most)]


def _graph_row(graph: SeenGraph, called: Mapping[str, str]) -> tuple[str, ...]:
    """Return a graph's row; ``called`` maps a compile's number to the module that it compiled."""
    made, place = graph.summary, str(graph.place) if graph.place.path else ""
    counts = ("-", "all") if made.problem else (str(len(made.kernels)), str(len(made.externs)))
    times = (str(graph.calls), format_seconds(graph.run_seconds)) if graph.calls else ("-", "-")
    spent = "cached" if made.cached else format_seconds(made.total_seconds)
    of = ", ".join(filter(None, (called.get(made.compile, ""), place)))
    return (made.compile, made.name, *counts, *times, spent, of)


def _graph_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose last column is below each row if there is no room beside it."""
    table = indented(format_table([row[:-1] for row in rows], right=(2, 3, 4, 5, 6)))
    if columns() - max(map(len, table)) > _LEAST_PLACE:
        return fitted_table(rows, right=(2, 3, 4, 5, 6), indent=2)
    lines = [table[0]]
    for (*_, place), line in zip(rows[1:], table[1:], strict=True):
        lines += [line, *wrapped(place, " " * 7, " " * 9)]
    return lines


def _modules(seen: Seen, most: int) -> list[str]:
    rows = [row for row in seen.by_module() if row[1] > 0]
    if not any(module for module, _, _ in rows):
        return []
    total = sum(seconds for _, seconds, _ in rows)
    table = [
        (module or "(the model itself)", format_seconds(spent), f"{spent / total:.0%}", str(calls))
        for module, spent, calls in rows[:most]
    ]
    lines = indented(format_table(table, right=(1, 2, 3)))
    return ["modules: time, share, launches", *lines, *_more(len(rows), most)]


def _by_time(title: str, rows: Sequence[Sequence[str]], most: int, names: range) -> list[str]:
    """Return a table of launches: their time, their calls and what they are."""
    table = fitted_table(rows[:most], right=(0, 1), names=names, indent=2) if rows else []
    return [f"{title}, by time", *table, *_more(len(rows), most)] if rows else []


def _kernels(launches: Sequence[Launch], most: int) -> list[str]:
    rows = [
        (format_seconds(k.seconds), f"{k.calls} x", _numbered(k.graph), k.name, k.module, "")
        for k in launches
        if k.calls
    ]
    return _by_time("kernels", rows, most, range(3, 5))


def _numbered(graph: str) -> str:
    """Return a graph as its table has it: "0/0 forward" for "forward 0/0"."""
    name, _, number = graph.partition(" ")
    return f"{number} {name}".strip()


def _eager_kernels(launches: Sequence[Launch], most: int) -> list[str]:
    """Return eager kernels, those of one operation as one row, with the modules they are in."""
    groups = alike((one for one in launches if one.calls), lambda one: (one.name, one.reason))
    summed = [(sum(one.seconds for one in some), some) for some in groups]
    rows = [
        (
            format_seconds(seconds),
            f"{sum(one.calls for one in some)} x",
            some[0].name,
            _within(some),
            some[0].reason,
        )
        for seconds, some in sorted(summed, key=lambda row: -row[0])
    ]
    return _by_time("eager kernels", rows, most, range(2, 4))


def _within(launches: Sequence[Launch]) -> str:
    """Return the module in which launches take most, and how many others there are."""
    modules = list(dict.fromkeys(launch.module for launch in launches if launch.module))
    if len(modules) < 2:
        return "".join(modules)
    return f"{modules[0]} and {len(modules) - 1} more"


def _compiles(seen: Seen) -> list[str]:
    """Return the phases of compiles, fusec's own after Dynamo's and AOTAutograd's."""
    spent = {n: format_seconds(seconds) for n, seconds in seen.compile_seconds.items() if seconds}
    theirs = [f"{name} {time}" for name, time in spent.items() if not name.startswith(_OWN)]
    own = [f"{n.removeprefix(_OWN)} {time}" for n, time in spent.items() if n.startswith(_OWN)]
    said = ", ".join(theirs) + (f"; fusec: {', '.join(own)}" if own else "")
    return wrapped(f"compile, by phase: {said}", following="  ") if spent else []


_OWN = "fusec: "
"""The prefix of the names of fusec's own phases."""


def _more(count: int, shown: int) -> list[str]:
    return [f"  and {count - shown} more, which --json lists"] if count > shown else []
