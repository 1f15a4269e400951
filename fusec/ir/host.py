"""Host programs: what a graph's call does on the host, one statement after the other.

Grammar of the printed form::

    program    ::= statement*
    statement  ::= allocation | 'free' buffer, ... | step | run | loop
    allocation ::= 'new' buffer | 'zero' buffer | buffer 'over' buffer
    step       ::= name ':' buffer, ... '->' buffer, ...     a launch, a call, a constant, a size
    run        ::= 'run' kernel, ... ':' ...                 kernels that one native call launches
    loop       ::= ['run'] step, and the program of its body, indented

The printers of Python and of C walk these statements, and so do the interpreter, the verifier, and
what counts or draws memory.

A buffer that kernels and loops write is allocated before. It may lie over one of the same footprint
whose value no later step reads, or that the kernel which writes it reads for the last time, if the
kernel may overwrite that operand (``overwritable``). Inputs, and buffers of which eager kernels may
have kept a view, can be freed, which drops the reference, but nothing lies over them.

Worked example: ``k0: x -> a``, ``k1: a -> b``, ``k2: b -> c`` with all of one layout. If k1 may
overwrite what it reads, b can lie over a instead::

    new a
    k0: x -> a
    free x
    new b
    k1: a -> b
    c over a
    k2: b -> c
    free a, b
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from fusec.ir.definition import sizes_in
from fusec.ir.expr import Buffer
from fusec.ir.graph import (
    CallStep,
    Constant,
    Extern,
    ForeachKernel,
    Graph,
    Kernel,
    RowLoop,
    SizeMinimum,
    Step,
)
from fusec.ir.index import Size
from fusec.ir.memory import footprint, made_by, overwritable, owned
from fusec.ir.verify import check


@dataclass(frozen=True, slots=True)
class Allocation:
    """Give a buffer memory: new, or that of ``over``.

    Attributes:
        zeroed: new memory begins as zeros, for a loop or the programs of a kernel add to it.
    """

    buffer: Buffer
    over: Buffer | None = None
    zeroed: bool = False


@dataclass(frozen=True, slots=True)
class FreeBuffers:
    """Drop the references to buffers, which no later statement uses."""

    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NativeRun:
    """Launch consecutive kernels by one native call."""

    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HostLoop:
    """Run the body of a row loop for each chunk of rows.

    Attributes:
        native: one native call runs all iterations. What the body allocates is allocated once.
    """

    loop: RowLoop
    body: HostProgram
    native: bool = False


HostStatement: TypeAlias = (
    "Allocation | FreeBuffers | NativeRun | HostLoop | Kernel | ForeachKernel | CallStep"
)


@dataclass(frozen=True, slots=True)
class HostProgram:
    """The statements of a graph's call, from its inputs to its results."""

    graph: Graph
    statements: tuple[HostStatement, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The schedule's steps, in order."""
        return tuple(step for statement in self.statements for step in steps_of(statement))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels, without those of foreach kernels and inside loops over rows."""
        return tuple(step for step in self.steps if isinstance(step, Kernel))

    @property
    def externs(self) -> tuple[Extern, ...]:
        """The calls of eager kernels, without those inside loops over rows."""
        return tuple(step for step in self.steps if isinstance(step, Extern))

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The tensors that the model holds."""
        return tuple(step for step in self.steps if isinstance(step, Constant))

    @property
    def loops(self) -> tuple[HostLoop, ...]:
        """The loops over rows."""
        return tuple(s for s in self.statements if isinstance(s, HostLoop))


def steps_of(statement: HostStatement) -> tuple[Step, ...]:
    """Return the steps of a schedule that a statement runs."""
    match statement:
        case Allocation() | FreeBuffers():
            return ()
        case NativeRun(kernels):
            return kernels
        case HostLoop(loop):
            return (loop,)
        case _:
            return (statement,)


def overlaid(program: HostProgram) -> dict[str, frozenset[Buffer]]:
    """Return kernel -> buffers that share memory, for kernels that overwrite operands."""
    found: dict[str, frozenset[Buffer]] = {}
    over: dict[Buffer, Buffer] = {}
    for statement in program.statements:
        match statement:
            case Allocation(buffer, Buffer() as under):
                over[buffer] = under
            case HostLoop():
                found |= overlaid(statement.body)
        for step in steps_of(statement):
            pairs = [{b, over[b]} for b in step.writes if over.get(b) in step.reads]
            if pairs:
                assert isinstance(step, Kernel)
                found[step.name] = frozenset().union(*pairs)
    return found


# -- the printed form ------------------------------------------------------------------------------


def print_host(program: HostProgram) -> str:
    """Return the text of a program, with one line for each statement."""
    return "\n".join(_lines(program))


def _lines(program: HostProgram) -> Iterator[str]:
    for statement in program.statements:
        match statement:
            case Allocation(buffer, None, zeroed):
                yield f"{'zero' if zeroed else 'new'} {buffer}"
            case Allocation(buffer, over):
                yield f"{buffer} over {over}"
            case FreeBuffers(buffers):
                yield f"free {_names(buffers)}"
            case NativeRun(kernels):
                names = ", ".join(kernel.name for kernel in kernels)
                yield f"run {names}: {_effects(kernels)}"
            case HostLoop(loop, body, native):
                yield f"{'run ' * native}{loop.name}: {_effects((loop,))}"
                yield from (f"  {line}" for line in _lines(body))
            case _:
                yield f"{name_of(statement)}: {_effects((statement,))}"


def _effects(steps: tuple[Step, ...]) -> str:
    """Print the buffers that steps read of others, and those that they write."""
    written = dict.fromkeys(b for step in steps for b in step.writes)
    read = dict.fromkeys(b for step in steps for b in step.reads if b not in written)
    sizes = dict.fromkeys(size for step in steps for size in step.defines_sizes)
    results = ", ".join(str(made) for made in (*written, *sizes))
    return " ".join(filter(None, (_names(tuple(read)), "->", results)))


def _names(buffers: tuple[Buffer, ...]) -> str:
    return ", ".join(buffer.name for buffer in buffers)


def name_of(step: Step) -> str:
    """Return a step's name: of a launch its own, of a call its node's."""
    match step:
        case Kernel() | ForeachKernel() | RowLoop():
            return step.name
        case Extern() | Constant():
            return step.node
        case SizeMinimum():
            return "min"


# -- verification ----------------------------------------------------------------------------------


def verify_host(program: HostProgram) -> None:
    """Check that each value has memory of its own while it is live.

    Nothing is read before it was written, after it was freed, or after another buffer was written
    over it; no size is used before it is known; nothing lies over memory of which an eager kernel
    may have kept a view.

    Raises:
        InvalidIR: naming the statement and the buffer at fault.
    """
    state = _HostState(program.graph)
    for position, statement in enumerate(program.statements):
        line = f"statement {position}"
        match statement:
            case Allocation():
                state.allocate(statement, line)
            case FreeBuffers(buffers):
                for buffer in buffers:
                    state.free(buffer, line)
            case NativeRun(kernels):
                check(len(kernels) > 1, line, "a run of fewer than two kernels")
            case HostLoop():
                verify_host(statement.body)
        for step in steps_of(statement):
            state.run(step, line)
    for buffer in program.graph.returned:
        state.read(buffer, "return")


class _HostState:
    """The state of memory between two statements.

    Attributes:
        memory: buffer that has memory -> the first buffer that was allocated there.
        held: for each memory, by that first buffer, the buffer whose value it has.
        own: buffers over which others may be laid.
        shared: buffers of which an eager kernel that has run may have kept a view.
        known: sizes that have a value.
    """

    def __init__(self, graph: Graph) -> None:
        self.memory = {item: item for item in graph.inputs if isinstance(item, Buffer)}
        self.held = dict(self.memory)
        self.own: set[Buffer] = set()
        self.shared: set[Buffer] = set()
        self.known = set(graph.given_sizes)

    def allocate(self, allocation: Allocation, line: str) -> None:
        buffer, over = allocation.buffer, allocation.over
        check(buffer not in self.memory, line, f"{buffer} is in memory twice")
        self.need(sizes_in((*buffer.shape, *buffer.strides)), line)
        if over is not None:
            check(over in self.memory, line, f"{buffer} lies over {over}, which has no memory")
            check(over in self.own, line, f"{buffer} lies over {over}, the memory of others")
            check(over not in self.shared, line, f"{buffer} lies over {over}, which others may see")
            check(footprint(buffer) == footprint(over), line, f"{buffer} does not fit over {over}")
        self.memory[buffer] = buffer if over is None else self.memory[over]
        self.own.add(buffer)

    def run(self, step: Step, line: str) -> None:
        made = made_by(step)
        self.need(step.sizes, line)
        for buffer in made:
            check(buffer in self.memory, line, f"{buffer} is written, and has no memory")
        for buffer in step.reads:
            if buffer not in made or self.held.get(self.memory[buffer]) is buffer:
                self.read(buffer, line)
        self.overwrite(step, made, line)
        for buffer in set(step.writes) - set(made):
            check(buffer not in self.memory, line, f"{buffer} is in memory twice")
            self.memory[buffer] = buffer
        self.held.update((self.memory[buffer], buffer) for buffer in step.writes)
        self.own.update(owned(step))
        match step:
            case Extern() if step.may_alias:
                self.shared.update(step.reads)
        self.known.update(step.defines_sizes)

    def overwrite(self, step: Step, made: tuple[Buffer, ...], line: str) -> None:
        """Check that a step reads the operands whose memory it writes before it writes it."""
        lying = defaultdict(list)
        for buffer in step.reads:
            lying[self.memory[buffer]].append(buffer)
        pairs = [(m, over) for m in made for over in lying[self.memory[m]] if over != m]
        may = overwritable(step) if pairs and isinstance(step, Kernel) else {}
        for buffer, over in pairs:
            problem = f"{buffer} lies over {over}, which may be read after {buffer} is written"
            check(over in may.get(buffer, ()), line, problem)

    def read(self, buffer: Buffer, line: str) -> None:
        check(buffer in self.memory, line, f"{buffer} is read, and has no memory")
        holder = self.held.get(self.memory[buffer])
        problem = "before it is written" if holder is None else f"where {holder} was written"
        check(holder is buffer, line, f"{buffer} is read {problem}")

    def free(self, buffer: Buffer, line: str) -> None:
        check(buffer in self.memory, line, f"{buffer} is freed, and has no memory")
        del self.memory[buffer]

    def need(self, sizes: set[Size] | tuple[Size, ...], line: str) -> None:
        unknown = sorted(size.name for size in set(sizes) - self.known)
        check(not unknown, line, f"the size {', '.join(unknown)} is not known yet")
