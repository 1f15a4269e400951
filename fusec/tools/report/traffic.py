"""Bytes that a schedule moves, and the least that any schedule with the same externs could.

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
"""

from __future__ import annotations

from fusec.ir.expr import Buffer
from fusec.ir.graph import Extern, ForeachKernel, Kernel, RowLoop, Schedule, Step
from fusec.ir.machine import Machine
from fusec.passes.fusion.cost import buffer_bytes, moved_bytes
from fusec.passes.fusion.footprint import kernel_traffic
from fusec.passes.traffic import extern_bytes, view_bytes


def bytes_moved(schedule: Schedule, machine: Machine) -> int:
    """Return the bytes that all steps read and write."""
    return sum(step_bytes(step, machine) for step in schedule.steps)


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

    Results are copied into their rows, sums added up: each is read and written outside the body.
    """
    copied = sum(buffer_bytes(b) for b in loop.results)
    added = sum(buffer_bytes(b) for b in loop.sums)
    zeroed = sum(buffer_bytes(b) for b in (*loop.sums, *loop.added))
    return loop.rounds * (bytes_moved(loop.schedule, machine) + 3 * added) + 2 * copied + zeroed


def _chunked_floor(loop: RowLoop) -> int:
    return sum(map(view_bytes, loop.views)) + sum(map(buffer_bytes, loop.writes))


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
                total += _chunked_floor(step)
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
