"""``fusec.expect``: a test's expectations of a compile, and the message where they fail.

Worked example, a test of a user's::

    def test_the_block_is_one_kernel() -> None:
        fusec.expect(Block(), torch.randn(8, 64), kernels=1, externs=["mm"])

Nothing is computed. A number is exact; ``(low, high)`` allows what lies between, both included, and
either may be None. Eager kernels are expected by number or by name, in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, TypeAlias

from fusec.errors import ContractBroken, UsageError
from fusec.tools.report import Explanation, explanation, stage_call
from fusec.tools.report.lock import LockedCall, LockedGraph, LockedKernel, lock_graph
from fusec.tools.report.lock_changes import decision_between, reason_of
from fusec.tools.report.stages import choose_target
from fusec.tools.report.watching import watch
from fusec.tools.terminal import format_bytes

Limit: TypeAlias = float | tuple[float | None, float | None]
SHOWN = 12
"""The most launches, and the most rejected merges, that a message names."""


def expect(
    fn: Callable[..., Any],
    *inputs: Any,
    kernels: Limit | None = None,
    launches: Limit | None = None,
    bytes: Limit | None = None,
    externs: Limit | Sequence[str] | None = None,
    train: bool = False,
    target: str | None = None,
    dynamic: bool = False,
    race: str | None = None,
    **named: Any,
) -> Explanation:
    """Return what ``fusec.explain`` does, if it is as expected; all graphs count together.

    Args:
        kernels: of fusec's own; ``launches`` are these and eager kernels.
        bytes: that all of them read and write.
        externs: eager kernels, by number or by name, as ``explain`` calls them.
        train, target, dynamic, race: as of ``fusec.explain``.
        named: arguments of ``fn`` by name.
    Raises:
        ContractBroken: an ``AssertionError``, which names what is otherwise, with the user's lines.
        UsageError: if nothing is expected, or something that is no limit.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    limits = {"kernels": kernels, "launches": launches, "bytes": bytes}
    counted = {what: limit for what, limit in limits.items() if limit is not None}
    if not counted and externs is None:
        raise UsageError("nothing is expected: give kernels, launches, bytes or externs.")
    with watch() as watched:
        staged = stage_call(fn, inputs, named, train, target, dynamic, race)
    found = explanation(choose_target(target).name, staged, watched.seen)
    numbers = {
        "kernels": sum(len(graph.kernels) for graph in found.graphs),
        "launches": sum(graph.launches for graph in found.graphs),
        "bytes": sum(graph.bytes_moved for graph in found.graphs),
    }
    wrong = [w for what, limit in counted.items() for w in _off(what, limit, numbers[what])]
    ops = [extern.op for graph in found.graphs for extern in graph.externs]
    wrong += _off_externs(externs, ops) if externs is not None else ()
    if wrong:
        graphs = [lock_graph(one) for one in staged]
        breaks = [f"{b.place}: {b.said}" for b in found.breaks]
        raise ContractBroken("\n".join([*wrong, *breaks, *_described(graphs)]))
    return found


def _off(what: str, limit: Limit, seen: int) -> Iterator[str]:
    """Yield a message if a number is off its limit."""
    low, high = _bounds(what, limit)
    if (low is not None and seen < low) or (high is not None and seen > high):
        shown = f"{seen:,} ({format_bytes(seen)})" if what == "bytes" else str(seen)
        yield f"{what}: {shown}, expected {_wanted(low, high)}"


def _bounds(what: str, limit: object) -> tuple[float | None, float | None]:
    match limit:
        case bool():
            pass
        case int() | float():
            return limit, limit
        case (int() | float() | None as low, int() | float() | None as high):
            return low, high
    raise UsageError(
        f"{what}={limit!r}: give a number, or (least, most), of which one may be None."
    )


def _wanted(low: float | None, high: float | None) -> str:
    match low, high:
        case None, _:
            return f"at most {high:,.0f}"
        case _, None:
            return f"at least {low:,.0f}"
        case _:
            return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _off_externs(expected: Limit | Sequence[str], ops: Sequence[str]) -> Iterator[str]:
    """Yield a message for each difference in the eager kernels."""
    if isinstance(expected, int | float) or (
        isinstance(expected, tuple) and not all(isinstance(e, str) for e in expected)
    ):
        yield from _off("externs", expected, len(ops))
        return
    if isinstance(expected, str):
        raise UsageError(f"externs={expected!r}: give a number, or a list of names.")
    wanted, here = (
        Counter(op.removesuffix(".default") for op in map(str, o)) for o in (expected, ops)
    )
    for op, count in (here - wanted).items():
        yield f"externs: {count} x {op}, which was not expected"
    for op, count in (wanted - here).items():
        yield f"externs: {count} x {op} was expected, and is not there"


# -- what there is ---------------------------------------------------------------------------------


def _described(graphs: Sequence[LockedGraph]) -> Iterator[str]:
    """Yield the launches of graphs, with the user's lines, and why kernels are apart."""
    for graph in graphs:
        yield f"graph {graph.name}:"
        for entry in graph.entries[:SHOWN]:
            yield from _entry_lines(entry)
        if len(graph.entries) > SHOWN:
            yield f"  and {len(graph.entries) - SHOWN} more, which fusec.explain shows"
        yield from list(_apart(graph))[:SHOWN]


def _entry_lines(entry: LockedKernel | LockedCall) -> Iterator[str]:
    kind = "kernel" if isinstance(entry, LockedKernel) else "eager kernel"
    times = f", {entry.times} times" if entry.times > 1 else ""
    why = f": {entry.reason}" if isinstance(entry, LockedCall) else ""
    yield f"  {kind} {entry.title}{times}, {format_bytes(entry.bytes)}{why}"
    yield from (f"    {line}" for line in dict.fromkeys(p.line for p in entry.parts) if line)


def _apart(graph: LockedGraph) -> Iterator[str]:
    """Yield the pairs of kernels that a rule or the cost model keeps apart, with the reason."""
    for first, second in combinations(graph.kernels, 2):
        decision = decision_between(graph.decisions, first, second)
        if decision is not None:
            yield f"  {first.title} does not fuse with {second.title}: {reason_of(decision)}"
