"""The launches of a graph, as a report draws them: with their modules and buffers, layers once.

Loops over rows are flattened: their launches take their place, and read and write the buffers
around the loop. Views and sizes launch nothing; a launch that reads a view reads its base.

Launches that differ only in the layer become one box with a count. A frame is a repeated part of a
model (``tools/report/layers.py``): ``h.*`` for the modules ``h.0`` to ``h.47``. A box is drawn
where the first of its launches is, so that a frame shows one layer; launches outside of the layers
are before or after the frame.

Worked example: two blocks of ``ln`` and ``mlp`` launch ``a b a b c``; drawn are the frame ``h.*``
(2 layers) with the boxes ``2 x a`` and ``2 x b``, and ``c`` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Generic, TypeAlias, TypeVar

from torch import fx

from fusec.driver.pipeline import Compiled
from fusec.frontend.origin import module_path
from fusec.ir.expr import Buffer
from fusec.ir.graph import Extern, ForeachKernel, Kernel, RowLoop, Schedule
from fusec.ir.host import name_of
from fusec.ir.machine import Machine
from fusec.ir.names import operation_words
from fusec.tools.report.eager_cost import EagerCall
from fusec.tools.report.explanation import modules_of
from fusec.tools.report.layers import Layers
from fusec.tools.report.stages import Staged
from fusec.tools.report.traffic import step_bytes
from fusec.tools.terminal import alike

# -- launches --------------------------------------------------------------------------------------


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
    def kind(self) -> str:
        """Return "kernel", "foreach", or "library" for an eager kernel."""
        match self.step:
            case Kernel():
                return "kernel"
            case ForeachKernel():
                return "foreach"
            case Extern():
                return "library"

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
    walk = _Walk(staged.observed.graph, staged.compiled, staged.target.machine)
    return list(walk.take(staged.compiled.schedule, None))


class _Walk:
    """Walks through a schedule, and maps buffers of a loop's body to those around the loop."""

    def __init__(self, graph: fx.GraphModule, compiled: Compiled, machine: Machine) -> None:
        self.modules = {node.name: module_path(node) for node in graph.graph.nodes}
        self.kernels = modules_of(compiled.schedule, graph)
        self.code, self.machine = compiled.code, machine
        self.outside: dict[Buffer, Buffer] = {}

    def take(self, schedule: Schedule, loop: RowLoop | None) -> Iterator[DrawnStep]:
        for step in schedule.steps:
            match step:
                case RowLoop():
                    for buffer, view in step.outside.items():  # they are slices of
                        self.outside[buffer] = self.whole(view.buffer)
                    yield from self.take(step.schedule, step)
                case Kernel() | ForeachKernel():
                    yield self.drawn(step, loop)
                case Extern() if step.is_launch:
                    yield self.drawn(step, loop)
                case Extern() if step.reads:
                    self.outside.update(dict.fromkeys(step.writes, self.whole(step.reads[0])))

    def whole(self, buffer: Buffer) -> Buffer:
        return self.outside.get(buffer.base, buffer.base)

    def drawn(self, step: Launched, loop: RowLoop | None) -> DrawnStep:
        match step:
            case Extern():
                code, module = "", self.modules.get(step.node, "")
                every = [module]
            case Kernel() | ForeachKernel():
                code = self.code.get(step.name, step.name)
                module = self.kernels[step.name]
                every = [self.modules.get(b.name, "") for b in (*step.writes, *_inside(step))]
        return DrawnStep(
            step,
            module,
            tuple(dict.fromkeys(filter(None, every))),
            code,
            step_bytes(step, self.machine),
            tuple(dict.fromkeys(map(self.whole, step.reads))),
            tuple(dict.fromkeys(map(self.whole, step.writes))),
            loop,
        )


# -- boxes -----------------------------------------------------------------------------------------


_T = TypeVar("_T")
_Placed = TypeVar("_Placed", DrawnStep, EagerCall)


@dataclass(frozen=True, slots=True)
class Alike(Generic[_T]):
    """Launches that differ only in the layer, and their module's path, folded if it differs."""

    members: tuple[_T, ...]
    module: str

    @property
    def first(self) -> _T:
        return self.members[0]

    @property
    def count(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class Segment:
    """A section of the drawing, which has them from top to bottom.

    Attributes:
        frame: the repeated part, "transformer.h.*"; a loop over rows; or "".
        layers: the number of repetitions; 1 outside of frames.
        steps: positions of fusec's launches, among all of the graph's boxes.
        calls: positions of the eager launches.
    """

    frame: str
    layers: int
    steps: tuple[int, ...]
    calls: tuple[int, ...]


def fold_steps(steps: Iterable[DrawnStep], layers: Layers) -> list[Alike[DrawnStep]]:
    """Group fusec's launches that differ only in the layer."""

    def kind(step: DrawnStep) -> Hashable:
        shapes = tuple((b.shape, b.dtype) for b in step.writes)
        modules = frozenset(map(layers.folded, step.modules))
        what = (step.code or step.computes, step.reason, step.step.origin.source)
        return what, step.bytes, layers.folded(step.module), modules, shapes, id(step.loop)

    return _fold(steps, kind, layers)


def fold_calls(calls: Iterable[EagerCall], layers: Layers) -> list[Alike[EagerCall]]:
    """Group the eager launches of one operation in repeated modules."""

    def kind(call: EagerCall) -> Hashable:
        return call.op.rpartition(".")[0] or call.op, layers.folded(call.module)

    return _fold(calls, kind, layers)


def _fold(
    items: Iterable[_Placed], kind: Callable[[_Placed], Hashable], layers: Layers
) -> list[Alike[_Placed]]:
    found = []
    for group in alike(items, kind):
        path, *others = {item.module for item in group}
        found.append(Alike(tuple(group), layers.folded(path) if others else path))
    return found


# -- segments --------------------------------------------------------------------------------------


def segments(
    steps: Sequence[Alike[DrawnStep]], calls: Sequence[Alike[EagerCall]], layers: Layers
) -> tuple[Segment, ...]:
    """Return the segments of a drawing: frames in order, and the launches between them."""
    numbers = _numbers(steps, calls, layers)

    def frame_of(module: str) -> str:
        frame, _ = layers.layer_of(module)
        return frame if len(numbers.get(frame, ())) > 1 else ""

    own = _with_neighbours(
        [_loop(a) or frame_of(a.module) for a in steps], [a.count for a in steps]
    )
    eager = [frame_of(a.module) for a in calls]
    frames = list(dict.fromkeys(filter(None, (*own, *eager))))
    own_slots, eager_slots = _slots(own, frames), _slots(eager, frames)
    found = []
    for slot in range(2 * len(frames) + 1):
        frame = frames[slot // 2] if slot % 2 else ""
        mine = tuple(k for k, at in enumerate(own_slots) if at == slot)
        theirs = tuple(k for k, at in enumerate(eager_slots) if at == slot)
        if mine or theirs:
            found.append(Segment(frame, len(numbers.get(frame, ())) or 1, mine, theirs))
    return tuple(found)


def _loop(alike: Alike[DrawnStep]) -> str:
    loop = alike.first.loop
    if loop is None:
        return ""
    return (
        "a condition ends it" if loop.while_true else f"{loop.rounds} rounds of {loop.chunk} rows"
    )


def _numbers(
    steps: Sequence[Alike[DrawnStep]], calls: Sequence[Alike[EagerCall]], layers: Layers
) -> dict[str, set[str]]:
    """Map each frame that repeats to the numbers of its layers."""
    found: dict[str, set[str]] = {}
    repeated: set[str] = set()
    paths = [(step.module, alike.count) for alike in steps for step in alike.members]
    paths += [(call.module, alike.count) for alike in calls for call in alike.members]
    for module, count in paths:
        frame, number = layers.layer_of(module)
        if frame:
            found.setdefault(frame, set()).add(number)
            if count > 1:
                repeated.add(frame)
    return {frame: numbers for frame, numbers in found.items() if frame in repeated}


def _with_neighbours(frames: list[str], counts: list[int]) -> list[str]:
    """Return frames, where repeated launches without a module get the frame before them."""
    found: list[str] = []
    last = ""
    for frame, count in zip(frames, counts, strict=True):
        found.append(frame or (last if count > 1 else ""))
        last = frame or last
    return found


def _slots(frames: Sequence[str], order: Sequence[str]) -> list[int]:
    """Return the slot of each box: 2k + 1 is the k-th frame, 2k is the space before it.

    A launch among the boxes of a frame goes after the frame if most of them come before it, else
    before the frame.
    """
    places: dict[str, list[int]] = {}
    for position, frame in enumerate(frames):
        places.setdefault(frame, []).append(position)
    middles = [median_low(places.get(frame, [len(frames)])) for frame in order]
    return [
        2 * order.index(frame) + 1
        if frame
        else max((2 * k + 2 for k, middle in enumerate(middles) if middle < position), default=0)
        for position, frame in enumerate(frames)
    ]
