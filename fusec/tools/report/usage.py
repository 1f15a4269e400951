"""The memory that a graph holds over its call, from its host program (``ir/host.py``).

The caller's buffers (weights, inputs, what a forward saved) count until they are freed; the call's
own count from their allocation on. A loop over rows adds the peak of its body for as long as it
runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusec.ir.expr import Buffer
from fusec.ir.graph import Extern
from fusec.ir.host import (
    Allocation,
    FreeBuffers,
    HostLoop,
    HostProgram,
    HostStatement,
    name_of,
    steps_of,
)
from fusec.ir.memory import bytes_of
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
    record = staged.records.get("memory")
    if staged.compiled is None or record is None or not staged.compiled.schedule.steps:
        return None
    names = staged.observed.names
    moments, largest = _usage(record.structure)
    sizes = ((names.get(b.name, b.name), size) for b, size in largest.items())
    return Usage(moments, _ranked(sizes, layers))


def peak_bytes(program: HostProgram) -> int:
    """Return the peak bytes of the buffers that a program computes, at the hints of sizes.

    The workspace of eager kernels is unknown, and not counted.
    """
    return max((moment.made for moment in _usage(program)[0]), default=0)


def _usage(program: HostProgram) -> tuple[tuple[Moment, ...], Mapping[Buffer, int]]:
    """Return the bytes held at each step, and the buffers at the peak, with their bytes."""
    given = {item for item in program.graph.inputs if isinstance(item, Buffer)}
    given |= {constant.buffer for constant in program.constants}
    held: dict[Buffer, int] = {buffer: bytes_of(buffer) for buffer in given}
    moments: list[Moment] = []
    most, largest = -1, held
    for statement in program.statements:
        _hold(statement, held)
        theirs = sum(size for buffer, size in held.items() if buffer in given)
        made = sum(held.values()) - theirs
        if isinstance(statement, HostLoop):
            made += peak_bytes(statement.body)
        steps = steps_of(statement)
        moments += [Moment(name_of(step), theirs, made) for step in steps]
        if steps and theirs + made > most:
            most, largest = theirs + made, dict(held)
    return tuple(moments), largest


def _hold(statement: HostStatement, held: dict[Buffer, int]) -> None:
    """Add the buffers that a statement allocates, and remove those that it frees."""
    match statement:
        case Allocation(buffer, over):
            if over is not None:
                held.pop(over, None)
            held[buffer] = bytes_of(buffer)
        case FreeBuffers(buffers):
            for buffer in buffers:
                held.pop(buffer, None)
        case Extern() if statement.is_launch:
            held |= {buffer: bytes_of(buffer) for buffer in statement.writes}


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
