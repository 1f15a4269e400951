"""Plan the host program of a schedule: allocation, reuse and freeing by liveness, and runs.

Spec: ``schedule -> host program``. A buffer is freed after the last step that accesses it. If a
later kernel writes a buffer of the same footprint, the dead one is kept until then and its memory
reused: pages that are mapped, and perhaps cached, cost less than new ones. But keeping dead buffers
never raises the peak memory over all steps.

A kernel that may write a result over an operand that dies in it (``overwritable``) does so: it
needs one buffer less while it runs, and it writes memory that it has just read.

Inputs, and buffers of which an eager kernel may have kept a view, are never reused. The result of
an eager kernel is not kept for reuse: its memory goes back to the allocator, from which eager
kernels take theirs.

Consecutive small kernels are launched together (``NativeRun``). Their buffers are allocated before
the first and freed after the last, so a run may allocate few bytes only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from fusec.ir.expr import Buffer
from fusec.ir.graph import ForeachKernel, Kernel, RowLoop, Schedule, Step
from fusec.ir.host import Allocation, FreeBuffers, HostLoop, HostProgram, HostStatement, NativeRun
from fusec.ir.memory import added_to, bytes_of, footprint, kept_views, made_by, owned

_MOST_BUFFERS = 256
"""Most buffers of one native call: ctypes takes a thousand arguments."""
Overwritable: TypeAlias = Callable[[Kernel], Mapping[Buffer, tuple[Buffer, ...]]]


def plan_host(
    schedule: Schedule, may_overwrite: Overwritable = lambda kernel: {}, run_bytes: int = 0
) -> HostProgram:
    """Return the host program of a schedule.

    Args:
        may_overwrite: kernel -> its results, each with operands that it may overwrite.
        run_bytes: most bytes that the kernels of a run may allocate; 0: no runs.
    """
    plan = _Plan(schedule, may_overwrite)
    unread = tuple(b for b in plan.inputs if b not in plan.last)
    statements: list[HostStatement] = [FreeBuffers(unread)] * bool(unread)
    for positions in _launches(schedule, plan, run_bytes):
        new = [allocation for position in positions for allocation in plan.new[position]]
        dead = [a.over for a in new if a.over is not None]
        dead += [b for position in positions for b in plan.dying[position] if b not in plan.taken]
        steps = [schedule.steps[position] for position in positions]
        launched = _launch(steps, may_overwrite, natively=run_bytes > 0)
        freed = tuple(dict.fromkeys(dead))
        statements += [*new, launched, *[FreeBuffers(freed)] * bool(freed)]
    return HostProgram(schedule.graph, tuple(statements))


def _launch(steps: Sequence[Step], may_overwrite: Overwritable, *, natively: bool) -> HostStatement:
    """Return the statement that runs some consecutive steps.

    Args:
        natively: whether a native call can run several kernels.
    """
    if len(steps) > 1:
        return NativeRun(tuple(step for step in steps if isinstance(step, Kernel)))
    match steps[0]:
        case RowLoop() as loop:
            body = plan_host(loop.schedule, may_overwrite)
            even = loop.count.is_constant and not loop.results
            return HostLoop(loop, body, natively and even and body.kernels == body.steps)
        case step:
            return step


def _launches(schedule: Schedule, plan: _Plan, most: int) -> list[list[int]]:
    """Return the positions of steps, those of a run together.

    A run is of the most kernels that together allocate at most ``most`` bytes.
    """
    found: list[list[int]] = []
    size, buffers = most + 1, set[Buffer]()
    for position, step in enumerate(schedule.steps):
        match step:
            case Kernel() if most:
                new = sum(bytes_of(a.buffer) for a in plan.new[position] if a.over is None)
                touched = {*step.reads, *step.writes}
                if size + new > most or len(buffers | touched) > _MOST_BUFFERS:
                    found.append([])
                    size, buffers = 0, set()
                found[-1].append(position)
                size, buffers = size + new, buffers | touched
            case _:
                found.append([position])
                size = most + 1
    return found


class _Plan:
    """Live ranges of a schedule's buffers, and the reuse of memory.

    Attributes:
        first: buffer that is no input -> the first step that accesses it.
        last: buffer -> the last step that accesses it; the number of steps if it is returned.
        dying: for each step, the buffers that it is the last to access.
        over: buffer -> the buffer whose memory it reuses: one of ``taken`` was dead before the
            step, one of ``overwritten`` dies in it.
        bytes: for each step, bytes of live and kept buffers while it runs, without inputs.
        new: for each step, the allocations of the buffers that it writes and is first to access.
    """

    def __init__(self, schedule: Schedule, may_overwrite: Overwritable) -> None:
        self.inputs = {i: None for i in schedule.graph.inputs if isinstance(i, Buffer)}
        self.first: dict[Buffer, int] = {}
        self.last: dict[Buffer, int] = {}
        self.dying: list[list[Buffer]] = [[] for _ in schedule.steps]
        self.over: dict[Buffer, Buffer] = {}
        self.taken: set[Buffer] = set()
        self.overwritten: set[Buffer] = set()
        self._find_lives(schedule)
        self._overwrite(schedule, may_overwrite)
        self.bytes = self._count_bytes(len(schedule.steps))
        self.peak = max(self.bytes)
        self._reuse(schedule)
        self.new = [self._allocations(*each) for each in enumerate(schedule.steps)]

    def _find_lives(self, schedule: Schedule) -> None:
        for position, step in enumerate(schedule.steps):
            for buffer in (*step.reads, *step.writes):
                self.last[buffer] = position
                if buffer not in self.inputs:
                    self.first.setdefault(buffer, position)
        self.last.update(dict.fromkeys(schedule.graph.returned, len(schedule.steps)))
        for position, step in enumerate(schedule.steps):
            touched = dict.fromkeys((*step.reads, *step.writes))
            self.dying[position] += [b for b in touched if self.last[b] == position]

    def _overwrite(self, schedule: Schedule, may_overwrite: Overwritable) -> None:
        """Put results of kernels over operands that die in the same kernel."""
        own = {b for step in schedule.steps for b in owned(step)} - self.inputs.keys()
        own -= kept_views(schedule)
        for position, step in enumerate(schedule.steps):
            dying = own.intersection(self.dying[position])
            match step:
                case Kernel() if dying:
                    for buffer, operands in may_overwrite(step).items():
                        over = next((b for b in operands if b in dying), None)
                        if over is not None and self.first.get(buffer) == position:
                            self.over[buffer] = over
                            self.overwritten.add(over)
                            dying.remove(over)

    def _count_bytes(self, steps: int) -> list[int]:
        change = [0] * (steps + 2)
        for buffer, position in self.first.items():
            change[position + (buffer in self.over)] += bytes_of(buffer)
            change[self.last[buffer] + 1] -= bytes_of(buffer)
        return list(itertools.accumulate(change))

    def _reuse(self, schedule: Schedule) -> None:
        """Put results of kernels over dead buffers of the same footprint, the latest first."""
        own = {b for step in schedule.steps for b in made_by(step)} - self.inputs.keys()
        own -= kept_views(schedule)
        waiting: dict[object, list[Buffer]] = {}
        for position, step in enumerate(schedule.steps):
            match step:
                case Kernel() | ForeachKernel():
                    made = set(step.writes).difference(added_to(step))
                    self._place(filter(made.__contains__, step.writes), position, waiting)
            for buffer in self.dying[position]:
                if buffer in own and buffer not in self.overwritten:
                    waiting.setdefault(footprint(buffer), []).append(buffer)

    def _place(
        self, made: Iterable[Buffer], position: int, waiting: dict[object, list[Buffer]]
    ) -> None:
        for buffer in made:
            dead = waiting.get(footprint(buffer))
            if self.first.get(buffer) != position or buffer in self.over or not dead:
                continue
            start, size = self.last[dead[-1]] + 1, bytes_of(buffer)
            if max(self.bytes[start:position], default=0) + size <= self.peak:
                self.bytes[start:position] = [held + size for held in self.bytes[start:position]]
                self.taken.add(dead[-1])
                self.over[buffer] = dead.pop()

    def _allocations(self, position: int, step: Step) -> list[Allocation]:
        zeroed = added_to(step)
        new = [buffer for buffer in made_by(step) if self.first.get(buffer) == position]
        return [Allocation(b, self.over.get(b), b in zeroed) for b in new]
