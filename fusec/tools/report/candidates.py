"""The candidates that a compile takes: recorded in a lock file, and taken again.

Which candidate is fastest depends on the machine: a kernel of fusec's own in one of its
configurations, or one of several libraries; a memory format of images. ``Record`` wraps the judge
of a compile and notes its decisions. ``Pinned`` decides as a record says, times nothing, and
decides by rule where the record has no entry. An entry is two texts, the choice and its candidate::

    group 5f0c2d1e9a7b3c44 mm + gelu                          fused #2
    product mm.default f32[512,768](768,1) f32[768,3072](1,768)    oneDNN
    convolution convolution.default float32[4,16,32,32] ...   channels-last

A group's number is a digest of its structure, the same in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from torch import fx

from fusec.driver.stages import CompileContext
from fusec.frontend.fx_passes.memory_formats import CHANNELS_LAST, CONTIGUOUS, DECISION
from fusec.ir.choice import Choice, Decided, Judge, judge_by_rule
from fusec.passes.fusion.contract import FUSED, LIBRARY
from fusec.passes.fusion.libraries import ATEN

_BY_LOCK = "the lock says so"

Adapt: TypeAlias = Callable[[CompileContext], CompileContext]


class Record:
    """The decisions of a compile's judge.

    Attributes:
        pinned: the candidates to take, by choice.
    """

    def __init__(self, pinned: Mapping[str, str] | None = None) -> None:
        self.pinned = pinned or {}
        self._found: dict[str, str] = {}
        self._convolutions: dict[str, fx.Node] = {}

    @property
    def candidates(self) -> dict[str, str]:
        """The candidates that were taken, by choice."""
        decided = {
            choice: CHANNELS_LAST if node.meta[DECISION].taken else CONTIGUOUS
            for choice, node in self._convolutions.items()
            if DECISION in node.meta
        }
        return dict(sorted({**self._found, **decided}.items()))

    def around(self, context: CompileContext) -> CompileContext:
        """Return a context whose judge takes what is pinned, and is recorded."""
        return replace(context, judge=partial(self._decide, context.judge))

    def _decide(self, judge: Judge, choice: Choice) -> Decided:
        key = choice.describe()
        name = self.pinned.get(key)
        if name is None or not choice.offers(name):
            decided = judge(choice)
        else:
            saved_us = 0.0 if choice.kind == "group" else None
            decided = Decided(name, _BY_LOCK, saved_us, pinned=True)
        if choice.kind == "convolution":  # decided for all that share images with it
            self._convolutions[key] = choice.subject
        else:
            self._found[key] = _recorded(choice, decided.candidate)
        return decided


class Pinned(Record):
    """A record that is followed: no measurement of this machine is used."""

    def around(self, context: CompileContext) -> CompileContext:
        """Return a context whose judge takes what is pinned, else decides by rule."""
        return super().around(replace(context, judge=judge_by_rule))


def _recorded(choice: Choice, name: str) -> str:
    """Return a candidate as lock files name it: which library beat a kernel is another choice."""
    return LIBRARY if choice.kind == "group" and not choice.is_alternative(name) else name


def is_candidate(choice: str, name: str) -> bool:
    """Return True for a valid entry: a known kind of choice, and one of its candidates."""
    match choice.partition(" ")[0]:
        case "group":
            return name == LIBRARY or name.removeprefix(FUSED).isdigit()
        case "convolution":
            return name in (CONTIGUOUS, CHANNELS_LAST)
        case "product":
            return name == ATEN or name.isidentifier()
        case _:
            return False
