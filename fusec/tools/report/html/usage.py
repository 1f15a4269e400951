"""The memory that a graph holds over its call, from the plan of memory (``ir/memory.py``).

The caller's buffers (weights, inputs, what a forward saved) count until they are freed; the call's
own count from their allocation on. A loop over rows adds the peak of its body for as long as it
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fusec.ir.expr import Buffer
from fusec.ir.graph import Extern, RowLoop, Schedule, Step
from fusec.ir.memory import Memory, bytes_of, steps_with_runs
from fusec.tools.report.layers import Layers
from fusec.tools.report.stages import Staged


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes that are held while one step runs: the caller's, and the call's own."""

    step: str
    given: int
    made: int

    @property
    def bytes(self) -> int:
        return self.given + self.made


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory over a call.

    Attributes:
        largest: the largest buffers at the peak, (name, bytes): inputs by the program's names,
            those of repeated layers together.
    """

    moments: tuple[Moment, ...]
    largest: tuple[tuple[str, int], ...]

    @property
    def peak(self) -> Moment:
        """The moment at which the most bytes are held."""
        return max(self.moments, key=lambda moment: moment.bytes)


LARGEST = 6


def usage_of(staged: Staged, layers: Layers) -> Usage | None:
    """Return the memory of a graph; None where it runs as eager kernels, or runs nothing."""
    record = staged.trace.records.get("memory")
    if staged.compiled is None or record is None or not staged.compiled.schedule.steps:
        return None
    names = staged.observed.names
    moments, largest = _usage(record.structure.schedule, record.structure.memory)
    sizes = ((names.get(b.name, b.name), size) for b, size in largest.items())
    return Usage(moments, _ranked(sizes, layers))


def _usage(schedule: Schedule, memory: Memory) -> tuple[tuple[Moment, ...], Mapping[Buffer, int]]:
    """Return the bytes held at each step, and the buffers at the peak, with their bytes."""
    given = {item for item in schedule.graph.inputs if isinstance(item, Buffer)}
    given -= set(memory.unread)
    given |= {constant.buffer for constant in schedule.constants}
    held: dict[Buffer, int] = {buffer: bytes_of(buffer) for buffer in given}
    bodies = iter(memory.bodies)
    moments: list[Moment] = []
    most, largest = -1, held
    for step, plan in zip(schedule.steps, steps_with_runs(memory), strict=True):
        for allocation in plan.allocated:
            if allocation.over is not None:
                held.pop(allocation.over, None)
            held[allocation.buffer] = bytes_of(allocation.buffer)
        held |= {buffer: bytes_of(buffer) for buffer in _made(step)}
        inside = _inside(step, bodies)
        theirs = sum(size for buffer, size in held.items() if buffer in given)
        made = sum(held.values()) - theirs + inside
        moments.append(Moment(_name(step), theirs, made))
        if theirs + made > most:
            most, largest = theirs + made, dict(held)
        for buffer in plan.freed:
            held.pop(buffer, None)
    return tuple(moments), largest


def _ranked(sizes: Iterable[tuple[str, int]], layers: Layers) -> tuple[tuple[str, int], ...]:
    """Return the largest of some buffers, those of repeated layers together."""
    alike: dict[str, list[tuple[str, int]]] = {}
    for name, size in sizes:
        alike.setdefault(layers.folded(name), []).append((name, size))
    found = [
        (f"{len(rows)} × {name}" if len(rows) > 1 else rows[0][0], sum(size for _, size in rows))
        for name, rows in alike.items()
    ]
    return tuple(sorted(found, key=lambda row: -row[1])[:LARGEST])


def _made(step: Step) -> tuple[Buffer, ...]:
    """Return the buffers that a step allocates itself: the results of an eager kernel."""
    match step:
        case Extern() if step.is_launch:
            return step.writes
        case _:
            return ()


def _inside(step: Step, bodies: Iterator[Memory]) -> int:
    match step:
        case RowLoop(body=Schedule() as body):
            moments, _ = _usage(body, next(bodies))
            return max((moment.made for moment in moments), default=0)
        case _:
            return 0


def _name(step: Step) -> str:
    return str(getattr(step, "name", None) or getattr(step, "node", "") or "a size")
