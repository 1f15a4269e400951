"""Bytes that a schedule moves, the least that any with the same externs could, and bytes it holds.

Moved: for each kernel, every buffer's elements that it reads, once for each sweep that no cache of
the machine answers (``passes/fusion/sweeps.py``), and that it writes, once; for each extern its
tensor inputs and outputs once.

Floor: what externs move, plus each tensor once that crosses between kernels and the rest: inputs
of the graph and results of externs that kernels read, outputs of the graph and arguments of externs
that kernels write. Tensors between one kernel and the next count nothing. Without externs that is
inputs once and outputs once. It is a lower bound: a residual that is needed before and after an
extern counts once, though it has to be read twice.

A loop over rows moves what its body moves, for each chunk: weights that it reads whole are read
once a chunk. Its floor is its inputs and its outputs, once.

Held, by the graph's host program (``ir/host.py``): the caller's buffers (weights, inputs, what a
forward saved) until they are freed, the call's own from their allocation on. A loop over rows adds
the peak of its body for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusec.ir.expr import Buffer
from fusec.ir.graph import Extern, ForeachKernel, Kernel, RowLoop, Schedule, Step
from fusec.ir.host import (
    Allocation,
    FreeBuffers,
    HostLoop,
    HostProgram,
    HostStatement,
    name_of,
    steps_of,
)
from fusec.ir.machine import Machine
from fusec.ir.memory import added_to, bytes_of
from fusec.passes.fusion.cost import buffer_bytes, moved_bytes
from fusec.passes.fusion.footprint import kernel_traffic
from fusec.passes.traffic import extern_bytes, view_bytes
from fusec.tools.report.layers import Layers
from fusec.tools.report.stages import Staged
from fusec.tools.terminal import alike

# -- bytes moved -----------------------------------------------------------------------------------


def bytes_moved(schedule: Schedule, machine: Machine) -> int:
    """Return the bytes that all steps read and write, and of the zeros that kernels add to."""
    zeros = sum(buffer_bytes(b) for kernel in schedule.kernels for b in added_to(kernel))
    return zeros + sum(step_bytes(step, machine) for step in schedule.steps)


def step_bytes(step: Step, machine: Machine) -> int:
    """Return the bytes that a step reads and writes."""
    match step:
        case Extern():
            return extern_bytes(step)
        case RowLoop():
            return row_loop_bytes(step, machine)
        case Kernel() | ForeachKernel():
            return sum(moved_bytes(kernel, machine) for kernel in step.kernels)
        case _:
            return 0


def row_loop_bytes(loop: RowLoop, machine: Machine) -> int:
    """Return the bytes that a loop over rows moves: its body's for each chunk, and its results'.

    Results are copied into their rows: each is read and written outside the body.
    """
    copied = sum(buffer_bytes(b) for b in loop.results)
    zeroed = sum(buffer_bytes(b) for b in loop.added)
    return loop.rounds * bytes_moved(loop.schedule, machine) + 2 * copied + zeroed


def bytes_floor(schedule: Schedule) -> int:
    """Return the least bytes for the same externs; see the module's docstring."""
    read: dict[Buffer, int] = {}
    written: dict[Buffer, int] = {}
    inputs = {item for item in schedule.graph.inputs if isinstance(item, Buffer)}
    outside = inputs | schedule.graph.returned
    total = 0
    kernels: list[Kernel] = []
    for step in schedule.steps:
        match step:
            case Kernel() | ForeachKernel():
                kernels.extend(step.kernels)
            case RowLoop():
                total += sum(map(view_bytes, step.views)) + sum(map(buffer_bytes, step.writes))
                outside |= set(step.reads)
            case Extern():
                total += extern_bytes(step)
                outside |= set(step.reads)
            case _:
                outside |= set(step.reads)
    for kernel in kernels:
        for buffer, (r, w) in kernel_traffic(kernel).items():
            read[buffer.base] = max(read.get(buffer.base, 0), r)
            written[buffer.base] = max(written.get(buffer.base, 0), w)
    made = {buffer for buffer, size in written.items() if size} - inputs
    total += sum(size for buffer, size in read.items() if buffer not in made)
    return total + sum(size for buffer, size in written.items() if buffer in outside)


# -- bytes held ------------------------------------------------------------------------------------


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
    if staged.compiled is None or not staged.compiled.schedule.steps:
        return None
    names = staged.observed.names
    moments, largest = _usage(staged.compiled.host)
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
    found = [
        (
            f"{len(more) + 1} × {layers.folded(name)}" if more else name,
            size + sum(n for _, n in more),
        )
        for (name, size), *more in alike(sizes, lambda row: layers.folded(row[0]))
    ]
    return tuple(sorted(found, key=lambda row: -row[1])[:LARGEST])
