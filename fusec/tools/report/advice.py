"""Advise on the costs that were seen in a program, the largest share of its time first.

All costs have one unit, the share of the program's time without its compiles. A graph's share is
measured; a graph break, or a graph that runs eagerly, costs at most the time outside of fusec's
graphs. A cost of compiling occurs once and comes last. A cost without a remedy is no advice, and a
recompile because the program does two things (it trains, it evaluates) is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from fusec.tools.terminal import format_us

if TYPE_CHECKING:
    from fusec.tools.report.seen import Seen, SeenGraph

_SLOW_SHARE = 0.1
"""The share of a program's time in graphs above which an eager kernel is worth a line of advice."""
_LOST_SHARE = 0.02
"""The share of a program's time above which a graph's loss to eager is worth a line."""
_LAUNCH_SECONDS = 1e-5
"""Seconds that a launch may take, the host's part included."""
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


_Row = TypeVar("_Row")
NONE = "none"
"""The first word of a remedy's text where there is no remedy."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One cost in a program, and its remedy.

    Attributes:
        place: the user's line, or the graph.
        said: what happens there.
        remedy: what to do about it, or "none" and why.
        share: of the time without compiles.
        bound: the share is an upper bound.
        seconds: of compiling, once.
        meant: nothing is to be changed.
    """

    place: str
    said: str
    remedy: str
    share: float = 0.0
    bound: bool = False
    seconds: float = 0.0
    meant: bool = False

    @property
    def cost(self) -> str:
        """The share of the time, or "once"."""
        if not self.share:
            return "once"
        return f"{'at most ' if self.bound else ''}{self.share:.0%} of the time"

    @property
    def helps(self) -> bool:
        """Whether there is something to do."""
        return not self.remedy.startswith(NONE)

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
    for alike in _alike(failed, lambda graph: graph.summary.problem):
        graph, *others = alike
        more = f" and {len(others)} more run" if others else " runs"
        said = f"graph {graph.summary.id}{more} as eager kernels: {graph.summary.problem}"
        share = sum(one.run_seconds for one in alike) / _running(seen)
        place, remedy = _places([_place(one) for one in alike]), _bisected(seen, graph)
        yield Advice(place, said, remedy, share or _elsewhere(seen), bound=not share)


def _alike(rows: Iterable[_Row], kind: Callable[[_Row], object]) -> list[list[_Row]]:
    """Group rows by kind, in the order of their first occurrence."""
    found: dict[object, list[_Row]] = {}
    for row in rows:
        found.setdefault(kind(row), []).append(row)
    return list(found.values())


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
    for alike in _alike(ranked, lambda b: (b.reason, str(b.remedy), b.skipped)):
        one, place = alike[0], _places(str(b.place) for b in alike)
        yield Advice(place, one.said, str(one.remedy), _elsewhere(seen), bound=True)


def _recompiles(seen: Seen) -> Iterator[Advice]:
    for alike in _alike(seen.recompiles, lambda r: (r.kind, str(r.remedy))):
        seconds, count = sum(r.seconds for r in alike), sum(r.count for r in alike)
        one = replace(alike[0], seconds=seconds, count=count)
        place = _places(str(r.place) for r in alike)
        yield Advice(place, one.said, str(one.remedy), seconds=seconds, meant=one.remedy.meant)


def _collections(seen: Seen) -> Iterator[Advice]:
    share = seen.collection_seconds / _running(seen)
    if share > _SLOW_SHARE:
        said = f"Python collects garbage {seen.collections} times"
        yield Advice("no line of yours", said, _COLLECT_LESS, share)


def _externs(seen: Seen) -> Iterator[Advice]:
    for launch in seen.slowest(eager=True):
        remedy = next((r for part, r in _EAGER_REMEDIES.items() if part in launch.reason), None)
        if remedy is not None and launch.seconds > _SLOW_SHARE * seen.run_seconds:
            where = f"{launch.name}{f' of {launch.module}' if launch.module else ''}"
            share = launch.seconds / _running(seen)
            yield Advice(where, f"an eager kernel: {launch.reason}", remedy, share)


def _losing(seen: Seen) -> Iterator[Advice]:
    graphs = {graph.summary.compile: graph for graph in reversed(seen.graphs)}  # the forward's
    for one in seen.compared:
        graph = graphs.get(one.compile)
        if graph is not None and one.loses:
            lost_us, what = one.fusec_us - one.eager_us, f"graph {graph.summary.id}"
            ours, theirs = format_us(one.fusec_us), format_us(one.eager_us)
            said = f"{what} takes {ours} a call, eagerly {theirs}"
            share = graph.calls * lost_us / 1e6 / _running(seen)
            if share > _LOST_SHARE:
                yield Advice(_place(graph), said, _leave_eager(graph), share)


def _leave_eager(graph: SeenGraph) -> str:
    function = graph.place.function or "its function"
    return (
        "leave this one eager: call the model itself, without torch.compile, or put "
        f"@torch.compiler.disable on {function}"
    )


def _launch_bound(seen: Seen) -> Iterator[Advice]:
    for graph in seen.graphs:
        share = graph.run_seconds / _running(seen)
        launches = len(graph.summary.kernels) + len(graph.summary.externs)
        if not graph.summary.problem and _is_launch_bound(graph, launches, seen.seconds):
            each = graph.run_seconds / graph.calls * 1e6
            said = (
                f"graph {graph.summary.id} is launch-bound: {launches} "
                f"launch{'es' * (launches != 1)} in {each:.3g} us a call"
            )
            remedy = 'larger batches, or fewer calls; on a GPU, mode="reduce-overhead"'
            yield Advice(_place(graph), said, remedy, share)


def _bisected(seen: Seen, graph: SeenGraph) -> str:
    """Return the command that finds the defect behind a failed compile."""
    if graph.summary.problem.startswith("Unsupported: "):
        return f"{NONE} is known"
    program = seen.what if seen.what.endswith(".py") else "SCRIPT"
    return f"fusec bisect --crash {program}, which ends with a file for a bug report"


def _is_launch_bound(graph: SeenGraph, launches: int, seconds: float) -> bool:
    """Return True for a graph with many calls in which a kernel takes less time than a launch."""
    if graph.calls < _MANY_CALLS or not launches:
        return False
    short = graph.run_seconds / graph.calls / launches < _LAUNCH_SECONDS
    return short and graph.run_seconds > _SLOW_SHARE * seconds
