"""Draw repeated layers once: launches that differ only in the layer become one box with a count.

A frame is a repeated part of a model (``tools/report/layers.py``): ``h.*`` for the modules ``h.0``
to ``h.47``. A box is drawn where the first of its launches is, so that a frame shows one layer;
launches outside of the layers are before or after the frame.

Worked example: two blocks of ``ln`` and ``mlp`` launch ``a b a b c``; drawn are the frame ``h.*``
(2 layers) with the boxes ``2 x a`` and ``2 x b``, and ``c`` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import Generic, TypeVar

from fusec.tools.report.eager import EagerCall
from fusec.tools.report.html.steps import DrawnStep
from fusec.tools.report.layers import Layers

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
    return _fold(steps, partial(_step_kind, layers), layers)


def fold_calls(calls: Iterable[EagerCall], layers: Layers) -> list[Alike[EagerCall]]:
    """Group the eager launches of one operation in repeated modules."""
    return _fold(calls, partial(_call_kind, layers), layers)


def _fold(
    items: Iterable[_Placed], kind: Callable[[_Placed], Hashable], layers: Layers
) -> list[Alike[_Placed]]:
    groups: dict[Hashable, list[_Placed]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    found = []
    for group in groups.values():
        path, *others = {item.module for item in group}
        found.append(Alike(tuple(group), layers.folded(path) if others else path))
    return found


def _step_kind(layers: Layers, step: DrawnStep) -> Hashable:
    """Return a key that is equal for the launches of repeated layers."""
    shapes = tuple((b.shape, b.dtype) for b in step.writes)
    modules = frozenset(map(layers.folded, step.modules))
    what = (step.code or step.computes, step.reason, step.step.origin.source)
    return what, step.bytes, layers.folded(step.module), modules, shapes, id(step.loop)


def _call_kind(layers: Layers, call: EagerCall) -> Hashable:
    return call.op.rpartition(".")[0] or call.op, layers.folded(call.module)


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
    return f"{loop.rounds} rounds of {loop.chunk} rows"


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
