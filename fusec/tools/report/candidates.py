"""The ways that a compile takes where there are several: recorded, and taken again.

Which way is the fastest depends on the machine: who computes a product, a kernel of fusec's own, in
one of its configurations, or one of several libraries; in which memory format images flow through
convolutions. ``Record`` stands around the judges of a compile and notes what they
said. ``Pinned`` stands in their place: it says what a record says, times nothing, and asks the
model, or the rule, about what the record does not know. A way is two texts, what and how::

    group 5f0c2d1e9a7b3c44 mm + gelu                          fused #2
    product mm.default f32[512,768](768,1) f32[768,3072](1,768)    oneDNN
    convolution convolution.default float32[4,16,32,32] ...   channels-last

A group's number is a digest of its structure, the same in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import fx

from fusec.driver.stages import CompileContext
from fusec.frontend.fx_passes.memory_formats import DECISION, Gain, gain_by_rule
from fusec.frontend.origin import op_name
from fusec.ir.graph import Extern
from fusec.ir.names import operation_words
from fusec.passes.fusion.contract import Choice, FuseGraph, Group, Judge, judge_by_model
from fusec.passes.fusion.libraries import Answer, describe_call

NAMED = "ATen"
"""The library that a call names."""
LIBRARY = "library"
FORMATS = {True: "channels-last", False: "contiguous"}
_BY_LOCK = "the lock says so"
_CERTAIN_US = 1e9
"""What a convolution gains whose format is given: more than any conversion costs."""

Adapt: TypeAlias = Callable[[CompileContext], CompileContext]


class Record:
    """What the judges of some compiles said.

    Attributes:
        pinned: what they are to say, by what they are asked.
    """

    def __init__(self, pinned: Mapping[str, str] | None = None) -> None:
        self.pinned = pinned or {}
        self._found: dict[str, str] = {}
        self._convolutions: dict[str, fx.Node] = {}

    @property
    def ways(self) -> dict[str, str]:
        """The ways that were taken, by what they are for."""
        decided = {
            asked: FORMATS[node.meta[DECISION].taken]
            for asked, node in self._convolutions.items()
            if DECISION in node.meta
        }
        return dict(sorted({**self._found, **decided}.items()))

    def around(self, context: CompileContext) -> CompileContext:
        """Return a context whose judges are heard by this record, and say what is pinned."""
        machine = context.target.machine
        make = context.make_judge or partial(judge_by_model, machine=machine)
        by_rule = partial(gain_by_rule, rates=machine)
        return replace(
            context,
            make_judge=lambda cut: self._judge(make, cut),
            choose_library=partial(self._library, context.choose_library or _by_rule),
            judge_format=partial(self._format, context.judge_format or by_rule),
        )

    def _judge(self, make: Callable[[FuseGraph], Judge], cut: FuseGraph) -> Judge:
        judge = make(cut)

        def choose(group: Group) -> Choice:
            asked = describe_group(group)
            way = self.pinned.get(asked)
            choice = judge(group) if way is None else _pinned_choice(way)
            fused = f"fused #{choice.configuration}"
            self._found[asked] = fused if choice.fused else LIBRARY
            return choice

        return choose

    def _library(self, choose: Callable[[Extern], Answer], call: Extern) -> Answer:
        asked = f"product {describe_call(call)}"
        way = self.pinned.get(asked)
        if way == NAMED or way in call.others:
            answer = Answer(None if way == NAMED else way, _BY_LOCK)
        else:
            answer = choose(call)
        self._found[asked] = answer.library or NAMED
        return answer

    def _format(self, judge: Callable[[fx.Node], Gain], convolution: fx.Node) -> Gain:
        asked = describe_convolution(convolution)
        self._convolutions[asked] = convolution
        way = self.pinned.get(asked)
        if way is None:
            return judge(convolution)
        return Gain(_CERTAIN_US if way == FORMATS[True] else -_CERTAIN_US, _BY_LOCK)


class Pinned(Record):
    """A record that is followed: nothing that was measured on this machine is asked for."""

    def around(self, context: CompileContext) -> CompileContext:
        """Return a context whose judges say what is pinned, or what the model and rules say."""
        alone = replace(context, make_judge=None, choose_library=None, judge_format=None)
        return super().around(alone)


def _by_rule(call: Extern) -> Answer:
    return Answer(None, "by rule: nothing is timed")


def _pinned_choice(way: str) -> Choice:
    fused = way != LIBRARY
    configuration = int(way.rpartition("#")[2]) if fused else 0
    return Choice(fused, configuration, _BY_LOCK, 0.0)


def is_way(asked: str, way: str) -> bool:
    """Return True for what may stand in a record: a kind of question, and one of its answers."""
    match asked.partition(" ")[0]:
        case "group":
            return way == LIBRARY or way.removeprefix("fused #").isdigit()
        case "convolution":
            return way in FORMATS.values()
        case "product":
            return way.isidentifier()
        case _:
            return False


def describe_group(group: Group) -> str:
    """Return a group as one line: a digest of its structure, and its operations."""
    digest = hashlib.sha256(group.signature.encode()).hexdigest()[:16]
    origins = [line.origin for line in group.graph.externs]
    origins += [line.origin for line in group.graph.defs]
    ops = operation_words(op for origin in origins for op in origin.ops)
    return f"group {digest} {' + '.join(ops)}"


def describe_convolution(convolution: fx.Node) -> str:
    """Return what a convolution's time depends on as one line."""

    def described(value: Any) -> str:
        if not isinstance(value, fx.Node):
            return str(value).replace(" ", "")
        tensor = value.meta["val"]
        shape = ",".join(str(extent) for extent in tensor.shape)
        return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]"

    arguments = " ".join(map(described, convolution.args))
    return f"convolution {op_name(convolution.target)} {arguments}"
