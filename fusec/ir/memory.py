"""Memory plans: allocation, reuse and lifetimes of a schedule's buffers, and their verifier.

Grammar of the printed form::

    memory ::= ['free' buffer, ...] step* run*     inputs that no step reads
    step   ::= allocation* ['free' buffer, ...]    before a step, and after it
    allocation ::= 'new' buffer | buffer 'over' buffer
    run    ::= 'run' kernel, ...                   one call launches them

A plan allocates the buffers that kernels and loops write. A buffer lies over one that is dead, or
over one that dies in the step, if its kernel may overwrite that operand (``overwritable``); the
operand is then freed after the step. Inputs, and buffers of which eager kernels may have kept a
view, are not the plan's: they can be freed, which drops the reference, but are never reused.

Worked example: ``k0: x -> a``, ``k1: a -> b``, ``k2: b -> c`` with all of one layout::

    new a           free x
    new b                         # a is dead, for reuse
    c over a        free b

Where each kernel may write over what it reads, b lies over a, and c over b::

    new a           free x
    b over a        free a
    c over b        free b
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fusec.errors import InvalidIR
from fusec.ir.definition import sizes_in
from fusec.ir.expr import Buffer, Expr, Load, Reduce, children, loads, postorder, reach
from fusec.ir.extern import Alias, Convolution, Fresh, Product
from fusec.ir.graph import Extern, ForeachKernel, Kernel, RowLoop, Schedule, Step, Store
from fusec.ir.index import Index, Size, index
from fusec.ir.verify import check


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory for a buffer: new, or that of ``over``, which is dead or dies in the step."""

    buffer: Buffer
    over: Buffer | None


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The allocations before a step, and the frees after it.

    Attributes:
        freed: buffers that no later step uses.
    """

    allocated: tuple[Allocation, ...] = ()
    freed: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class NativeRun:
    """Consecutive kernels that one native call launches.

    All buffers are allocated before the first kernel and freed after the last.

    Attributes:
        first: the position of its first step.
        kernels: names, in order.
    """

    first: int
    kernels: tuple[str, ...]

    @property
    def last(self) -> int:
        """The position of its last step."""
        return self.first + len(self.kernels) - 1


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a schedule.

    Attributes:
        unread: inputs that are freed before the first step.
        steps: the allocations and frees of each step.
        bodies: the plans of the bodies of its row loops, in order.
        runs: the kernels that are launched together, in order.
    """

    unread: tuple[Buffer, ...]
    steps: tuple[StepMemory, ...]
    bodies: tuple[Memory, ...] = ()
    runs: tuple[NativeRun, ...] = ()

    def of_run(self, run: NativeRun) -> StepMemory:
        """Return the allocations before a run, and the frees after it."""
        steps = self.steps[run.first : run.last + 1]
        allocated = tuple(a for step in steps for a in step.allocated)
        return StepMemory(allocated, tuple(b for step in steps for b in step.freed))


def made_by(step: Step) -> tuple[Buffer, ...]:
    """Return the buffers that need memory before a step, including inputs written in place."""
    match step:
        case Kernel() | ForeachKernel() | RowLoop():
            return step.writes
        case _:
            return ()


def owned(step: Step) -> tuple[Buffer, ...]:
    """Return the buffers that a step writes and nothing else aliases: their memory is reusable."""
    match step:
        case Extern(effect=Fresh() | Product() | Convolution()):
            return step.writes
        case _:
            return made_by(step)


def overwritable(kernel: Kernel) -> Mapping[Buffer, tuple[Buffer, ...]]:
    """Return result -> operands that it may overwrite, if the stores of a point run in order.

    Each element of the operand is read before the result is stored there: only by the point that
    stores it, or by reductions that the store waits for. Both have the same footprint.
    """
    found: dict[Buffer, tuple[Buffer, ...]] = {}
    operands = {b: footprint(b) for b in kernel.reads if b not in kernel.writes}
    for store in kernel.stores:
        own = footprint(store.buffer)
        fits = [b for b, size in operands.items() if size == own]
        over = tuple(b for b in fits if _is_read_before(kernel, store, b))
        if over and kernel.writes.count(store.buffer) == 1:
            found[store.buffer] = over
    return found


def _is_read_before(kernel: Kernel, store: Store, operand: Buffer) -> bool:
    """Return True if a kernel reads an operand where it stores a result, and before it does.

    Reductions over the inside axes of a point are complete before anything is stored there. Without
    inside axes a point is one block, in which all operands of a store precede it. A reduction
    beside the store (``_beside``) uses the element that the store has loaded.
    """
    place = store.buffer.offset(store.indices)
    for load in loads(s.expr for s in kernel.stores):
        if load.buffer is operand and operand.offset(load.indices) is not place:
            return False
    inside = frozenset(kernel.inside)
    awaited = {
        node
        for node in postorder((store.expr,))
        if not inside or (isinstance(node, Reduce) and node.axes.isdisjoint(inside))
    }
    awaited |= _beside(kernel, store, operand)
    return not any(
        _reads_outside(s.expr, operand, awaited, at_element=s is store) for s in kernel.stores
    )


def _beside(kernel: Kernel, store: Store, operand: Buffer) -> set[Expr]:
    """Return the reductions in a store's loop nest that load the operand only as the store does.

    They have its axes, and depend on no reduction that the store does not depend on: the gradient
    of a bias is summed in the loops that store its summands.
    """
    axes = store.buffer.offset(store.indices).axes
    at_store = reach((store.expr,), lambda node: () if isinstance(node, Reduce) else children(node))
    loaded = {node for node in at_store if isinstance(node, Load) and node.buffer is operand}
    awaited = set(postorder((store.expr,)))
    return {
        node
        for node in postorder(s.expr for s in kernel.stores)
        if isinstance(node, Reduce)
        and frozenset(node.over) | node.axes == axes
        and awaited.issuperset(n for n in postorder(node.bodies) if isinstance(n, Reduce))
        and loaded.issuperset(n for n in loads(node.bodies) if n.buffer is operand)
    }


def _reads_outside(root: Expr, operand: Buffer, awaited: set[Expr], *, at_element: bool) -> bool:
    """Return True if an expression reads an operand outside the nodes ``awaited``.

    Args:
        at_element: loads outside reductions are allowed.
    """
    waiting, seen = [root], set(awaited)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        match node:
            case Load(buffer=buffer) if buffer is operand and not at_element:
                return True
            case Reduce() if any(load.buffer is operand for load in loads((node,))):
                return True
        waiting += children(node)
    return False


def trivial_plan(schedule: Schedule) -> Memory:
    """Return the plan that gives each buffer memory of its own, and frees nothing."""
    present = {item for item in schedule.graph.inputs if isinstance(item, Buffer)}
    steps: list[StepMemory] = []
    for step in schedule.steps:
        new = [buffer for buffer in made_by(step) if buffer not in present]
        present.update(new)
        steps.append(StepMemory(tuple(Allocation(buffer, None) for buffer in new)))
    fused = [loop.body for loop in schedule.loops if isinstance(loop.body, Schedule)]
    return Memory((), tuple(steps), tuple(map(trivial_plan, fused)))


def footprint(buffer: Buffer) -> tuple[object, ...]:
    """Return a key that is equal for buffers that can use the same memory: extent and type.

    Their shapes may differ: a library makes a matrix where a kernel writes [batch, time, c].
    The number of elements distinguishes empty buffers from others.
    """
    elements = math.prod(buffer.shape, start=index(1))
    return elements, buffer.flat().shape, buffer.dtype


def kept_views(schedule: Schedule) -> set[Buffer]:
    """Return the buffers of which an eager kernel may have kept a view."""
    return {b for call in schedule.externs if call.may_alias for b in call.reads}


def overlaid(schedule: Schedule, memory: Memory) -> dict[str, frozenset[Buffer]]:
    """Return kernel -> buffers that share memory, for kernels that overwrite operands."""
    found: dict[str, frozenset[Buffer]] = {}
    for step, plan in zip(schedule.steps, memory.steps, strict=True):
        over = [a for a in plan.allocated if a.over in plan.freed]
        if over and isinstance(step, Kernel):
            found[step.name] = frozenset(b for a in over for b in (a.buffer, a.over) if b)
    for loop, body in zip(schedule.loops, memory.bodies, strict=True):
        found |= overlaid(loop.schedule, body)
    return found


def print_memory(schedule: Schedule, memory: Memory) -> str:
    """Return the text of a plan, with one line for each step."""
    lines = [f"free {', '.join(b.name for b in memory.unread)}"] if memory.unread else []
    for step in memory.steps:
        parts = [
            f"new {a.buffer}" if a.over is None else f"{a.buffer} over {a.over}"
            for a in step.allocated
        ]
        parts += [f"free {', '.join(b.name for b in step.freed)}"] if step.freed else []
        lines.append("; ".join(parts) or "-")
    lines += [f"run {', '.join(run.kernels)}" for run in memory.runs]
    for loop, body in zip(schedule.loops, memory.bodies, strict=True):
        inner = print_memory(loop.schedule, body).splitlines()
        lines += [f"{loop.name}:", *(f"  {line}" for line in inner)]
    return "\n".join(lines)


# -- verification ----------------------------------------------------------------------------------


def verify_memory(schedule: Schedule, memory: Memory) -> None:
    """Check that a plan gives each value memory of its own while it is live.

    No two live values share memory; nothing is read before it was written or after it was freed; no
    size is used before it is known; memory of which an eager kernel may have kept a view is not
    reused.

    Raises:
        InvalidIR: naming the step and the buffer at fault.
    """
    if len(memory.steps) != len(schedule.steps) or len(memory.bodies) != len(schedule.loops):
        raise InvalidIR("the memory of another schedule")
    walk = _MemoryState(schedule)
    for buffer in memory.unread:
        walk.free(buffer, "the first step")
    for position, (step, plan) in enumerate(zip(schedule.steps, memory.steps, strict=True)):
        walk.take(f"step {position}", step, plan)
    for view in schedule.graph.returned:
        walk.read(view, "return")
    _check_runs(schedule, memory)
    for loop, body in zip(schedule.loops, memory.bodies, strict=True):
        verify_memory(loop.schedule, body)


def _check_runs(schedule: Schedule, memory: Memory) -> None:
    behind = 0
    for run in memory.runs:
        line = f"steps {run.first} to {run.last}"
        check(behind <= run.first < run.last, line, "a run of no kernels that follow each other")
        steps = schedule.steps[run.first : run.last + 1]
        names = tuple(step.name for step in steps if isinstance(step, Kernel))
        check(names == run.kernels, line, "a run of other steps than its kernels")
        behind = run.last + 1


class _MemoryState:
    """The state of memory between two steps.

    Attributes:
        present: buffers that have memory; ``own`` are those whose memory the plan may reuse.
        written: buffers that hold a value.
        shared: buffers of which an eager kernel that has run may have kept a view.
        known: sizes that have a value.
    """

    def __init__(self, schedule: Schedule) -> None:
        graph = schedule.graph
        self.present = {item for item in graph.inputs if isinstance(item, Buffer)}
        self.written = set(self.present)
        self.own: set[Buffer] = set()
        self.shared: set[Buffer] = set()
        self.known = set(graph.given_sizes)

    def take(self, line: str, step: Step, plan: StepMemory) -> None:
        made = made_by(step)
        for allocation in plan.allocated:
            if allocation.over is not None and allocation.over in plan.freed:
                self.overwrite(allocation, step, line)
            self.allocate(allocation, made, plan, line)
        over = [a.over for a in plan.allocated if a.over is not None]
        check(len(set(over)) == len(over), line, "two buffers lie over one")
        self.need(step.sizes, line)
        for buffer in step.reads:
            if buffer not in made or buffer in self.written:
                self.read(buffer, line)
        for buffer in made:
            check(buffer in self.present, line, f"{buffer} is written, and has no memory")
        fresh = set(step.writes) - set(made)
        for buffer in fresh:
            check(buffer not in self.present, line, f"{buffer} is in memory twice")
        self.present |= fresh
        self.written.update(step.writes)
        self.own.update(owned(step))
        match step:
            case Extern() if step.may_alias:
                self.shared.update(step.reads)
        self.known.update(step.defines_sizes)
        for buffer in plan.freed:
            self.free(buffer, line)

    def overwrite(self, allocation: Allocation, step: Step, line: str) -> None:
        """Check that a kernel reads an operand before it overwrites it."""
        buffer, over = allocation.buffer, allocation.over
        may = overwritable(step) if isinstance(step, Kernel) else {}
        problem = f"{buffer} lies over {over}, which may be read after {buffer} is written"
        check(over in may.get(buffer, ()), line, problem)

    def allocate(
        self, allocation: Allocation, made: tuple[Buffer, ...], plan: StepMemory, line: str
    ) -> None:
        buffer, over = allocation.buffer, allocation.over
        check(buffer in made, line, f"{buffer} gets memory, and is not written")
        check(buffer not in self.present, line, f"{buffer} is in memory twice")
        self.need(sizes_in((*buffer.shape, *buffer.strides)), line)
        if over is not None:
            check(over in self.present, line, f"{buffer} lies over {over}, which has no memory")
            check(over in self.own, line, f"{buffer} lies over {over}, the memory of others")
            check(over not in self.shared, line, f"{buffer} lies over {over}, which others may see")
            check(footprint(buffer) == footprint(over), line, f"{buffer} does not fit over {over}")
            if over not in plan.freed:
                self.free(over, line)
        self.present.add(buffer)
        self.own.add(buffer)

    def read(self, buffer: Buffer, line: str) -> None:
        check(buffer in self.present, line, f"{buffer} is read, and has no memory")
        check(buffer in self.written, line, f"{buffer} is read before it is written")

    def free(self, buffer: Buffer, line: str) -> None:
        check(buffer in self.present, line, f"{buffer} is freed, and has no memory")
        self.present.remove(buffer)
        self.written.discard(buffer)

    def need(self, sizes: set[Size] | tuple[Size, ...], line: str) -> None:
        unknown = sorted(size.name for size in set(sizes) - self.known)
        check(not unknown, line, f"the size {', '.join(unknown)} is not known yet")


def bytes_of(buffer: Buffer) -> int:
    """Return the bytes of a buffer's storage, at the hints of sizes."""
    extents: tuple[Index, ...] = buffer.base.flat().shape
    return extents[0].hint() * buffer.dtype.itemsize


def steps_with_runs(memory: Memory) -> list[StepMemory]:
    """Return the plan of each step; a run allocates in its first step and frees in its last."""
    plans = list(memory.steps)
    for run in memory.runs:
        whole, between = memory.of_run(run), [StepMemory()] * (len(run.kernels) - 2)
        plans[run.first : run.last + 1] = [
            StepMemory(whole.allocated),
            *between,
            StepMemory(freed=whole.freed),
        ]
    return plans


def peak_bytes(schedule: Schedule, memory: Memory) -> int:
    """Return the peak bytes of the buffers that a schedule computes, at the hints of sizes.

    Inputs and constants are not counted, nor the workspace of eager kernels, which is unknown.
    """
    given = {item for item in schedule.graph.inputs if isinstance(item, Buffer)}
    bodies = iter(zip(schedule.loops, memory.bodies, strict=True))
    held: dict[Buffer, int] = {}
    most = 0
    for step, plan in zip(schedule.steps, steps_with_runs(memory), strict=True):
        for allocation in plan.allocated:
            if allocation.over is not None:
                held.pop(allocation.over, None)
            held[allocation.buffer] = bytes_of(allocation.buffer)
        match step:
            case Extern() if not isinstance(step.effect, Alias):
                held.update((b, bytes_of(b)) for b in step.writes if b not in given)
        inside = 0
        if isinstance(step, RowLoop):
            loop, body = next(bodies)
            inside = peak_bytes(loop.schedule, body)
        most = max(most, sum(held.values()) + inside)
        for buffer in plan.freed:
            held.pop(buffer, None)
    return most
