"""List the launches of a graph, as a report draws them: the module and the buffers of each.

Loops over rows are flattened: their launches take their place, and read and write the buffers
around the loop. Views and sizes launch nothing; a launch that reads a view reads its base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fusec.frontend.origin import module_path
from fusec.ir.expr import Buffer
from fusec.ir.graph import (
    Extern,
    ForeachKernel,
    Kernel,
    RowLoop,
    Schedule,
)
from fusec.ir.host import name_of
from fusec.ir.machine import Machine
from fusec.ir.names import operation_words
from fusec.tools.report.explanation import modules_of
from fusec.tools.report.stages import Staged
from fusec.tools.report.traffic import step_bytes

Launched: TypeAlias = "Kernel | ForeachKernel | Extern"


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """One launch.

    Attributes:
        module: that it belongs to, "h.3.mlp"; "" for the model itself.
        modules: of all definitions that it computes.
        code: the code that a kernel runs; "" for other steps.
        bytes: of one launch.
        reads, writes: buffers of the whole graph.
        loop: the loop over rows that launches it, or None.
    """

    step: Launched
    module: str
    modules: tuple[str, ...]
    code: str
    bytes: int
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    loop: RowLoop | None = None

    @property
    def is_kernel(self) -> bool:
        """Whether fusec generated it."""
        return bool(self.code)

    @property
    def name(self) -> str:
        return name_of(self.step)

    @property
    def reason(self) -> str:
        """Why an eager kernel is not lowered."""
        return str(getattr(self.step, "reason", ""))

    @property
    def computes(self) -> tuple[str, ...]:
        """The program's operations in it, each once; of an eager kernel, its full name."""
        match self.step:
            case Extern():
                return (self.step.title,)
            case Kernel() | ForeachKernel():
                return operation_words(self.step.origin.ops)

    @property
    def buffers(self) -> frozenset[str]:
        """The names of all buffers that it defines, stored or not, as decisions name them."""
        return frozenset(b.name for b in (*_inside(self.step), *self.step.writes))


def _inside(step: Launched) -> list[Buffer]:
    """Return the buffers that the kernels of a launch define."""
    return [b for kernel in getattr(step, "kernels", ()) for b in kernel.defs]


def drawn_steps(staged: Staged) -> list[DrawnStep]:
    """Return the launches of a graph, in order; [] if it runs as eager kernels."""
    if staged.compiled is None:
        return []
    graph, schedule = staged.observed.graph, staged.compiled.schedule
    modules = {node.name: module_path(node) for node in graph.graph.nodes}
    machine = staged.target.machine
    walk = _Walk(modules, modules_of(schedule, graph), staged.compiled.code, machine)
    return list(walk.take(schedule, None))


class _Walk:
    """Walks through a schedule, and maps buffers of a loop's body to those around the loop."""

    def __init__(
        self,
        modules: Mapping[str, str],
        kernels: Mapping[str, str],
        code: Mapping[str, str],
        machine: Machine,
    ) -> None:
        self.modules, self.kernels, self.code = modules, kernels, code
        self.machine = machine
        self.outside: dict[Buffer, Buffer] = {}

    def take(self, schedule: Schedule, loop: RowLoop | None) -> Iterator[DrawnStep]:
        for step in schedule.steps:
            match step:
                case RowLoop():
                    self.enter(step)
                    yield from self.take(step.schedule, step)
                case Kernel() | ForeachKernel():
                    yield self.drawn(step, loop)
                case Extern() if step.is_launch:
                    yield self.drawn(step, loop)
                case Extern() if step.reads:
                    self.outside.update(dict.fromkeys(step.writes, self.whole(step.reads[0])))

    def enter(self, loop: RowLoop) -> None:
        """Map the buffers of a loop's body to the buffers that they are slices of."""
        for buffer, view in loop.outside.items():
            self.outside[buffer] = self.whole(view.buffer)

    def whole(self, buffer: Buffer) -> Buffer:
        return self.outside.get(buffer.base, buffer.base)

    def drawn(self, step: Launched, loop: RowLoop | None) -> DrawnStep:
        code, first, every = self.places(step)
        return DrawnStep(
            step,
            first,
            every,
            code,
            step_bytes(step, self.machine),
            tuple(dict.fromkeys(map(self.whole, step.reads))),
            tuple(dict.fromkeys(map(self.whole, step.writes))),
            loop,
        )

    def places(self, step: Launched) -> tuple[str, str, tuple[str, ...]]:
        """Return a step's code, its module, and the modules of all that it computes."""
        match step:
            case Extern():
                own = self.modules.get(step.node, "")
                return "", own, (own,) if own else ()
            case Kernel() | ForeachKernel():
                made = (*step.writes, *_inside(step))
                every = dict.fromkeys(self.modules.get(b.name, "") for b in made)
                code = self.code.get(step.name, step.name)
                return code, self.kernels[step.name], tuple(filter(None, every))
