"""The candidates that a compile takes: recorded in a lock file, and taken again.

Which candidate is fastest depends on the machine: a kernel of fusec's own in one of its
configurations, or one of several libraries; a memory format of images. ``Record`` wraps the judge
of a compile and notes its decisions. ``Pinned`` decides as a record says, times nothing, and
decides by rule where the record has no entry. An entry is two texts, the choice and its candidate::

    group 5f0c2d1e9a7b3c44 mm + gelu -> fused #2
    product mm.default f32[512,768](768,1) f32[768,3072](1,768) -> oneDNN
    convolution convolution.default float32[4,16,32,32] ... -> channels-last

A group's number is a digest of its structure, the same in every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import fx

from fusec.driver.stages import CompileContext
from fusec.frontend.fx_passes.memory_formats import CHANNELS_LAST, CONTIGUOUS, DECISION
from fusec.ir.choice import Choice, Decided, Judge, judge_by_rule
from fusec.passes.fusion.contract import FUSED, LIBRARY

_BY_LOCK = "the lock says so"


class Record:
    """The decisions of a compile's judge.

    Attributes:
        pinned: the candidates to take, by choice.
    """

    def __init__(self, pinned: Mapping[str, str] | None = None) -> None:
        self.pinned = pinned or {}
        self._found: dict[str, str] = {}
        self._convolutions: dict[str, list[fx.Node]] = {}

    @property
    def candidates(self) -> dict[str, str]:
        """The candidates that were taken, by choice."""
        decided = dict(self._found)
        for choice, nodes in self._convolutions.items():
            formats = [_format(node) for node in nodes if DECISION in node.meta]
            for number, name in enumerate(formats):  # another component may decide otherwise
                if number == 0 or name != formats[0]:
                    decided[_numbered(choice, number)] = name
        return dict(sorted(decided.items()))

    def around(self, context: CompileContext) -> CompileContext:
        """Return a context whose judge takes what is pinned, and is recorded."""
        return replace(context, judge=partial(self._decide, context.judge))

    def _decide(self, judge: Judge, choice: Choice) -> Decided:
        key = choice.describe()
        earlier = self._convolutions.get(key, [])
        name = self.pinned.get(_numbered(key, len(earlier)), self.pinned.get(key))
        if name is None or not choice.offers(name):
            decided = judge(choice)
        else:
            saved_us = 0.0 if choice.kind == "group" else None
            decided = Decided(name, _BY_LOCK, saved_us, pinned=True)
        if choice.kind == "convolution":  # decided for all that share images with it
            self._convolutions[key] = [*earlier, choice.subject]
        else:
            self._found[key] = _recorded(choice, decided.candidate)
        return decided


class Pinned(Record):
    """A record that is followed: no measurement of this machine is used."""

    def around(self, context: CompileContext) -> CompileContext:
        """Return a context whose judge takes what is pinned, else decides by rule."""
        return super().around(replace(context, judge=judge_by_rule))


def _numbered(choice: str, number: int) -> str:
    """Return the key of a convolution that differs from the first of the same arguments."""
    return f"{choice} #{number}" if number else choice


def _format(convolution: fx.Node) -> str:
    return CHANNELS_LAST if convolution.meta[DECISION].taken else CONTIGUOUS


def _recorded(choice: Choice, name: str) -> str:
    """Return a candidate as lock files name it: which library beat a kernel is another choice."""
    return LIBRARY if choice.kind == "group" and not choice.is_alternative(name) else name


def is_candidate(choice: str, name: str) -> bool:
    """Return True for a valid entry: a known kind of choice, and one of its candidates."""
    match choice.partition(" ")[0]:
        case "group":
            number = name.removeprefix(FUSED)
            return name == LIBRARY or (number != name and number.isascii() and number.isdecimal())
        case "convolution":
            return name in (CONTIGUOUS, CHANNELS_LAST)
        case "product":
            return bool(name) and name.isprintable()
        case _:
            return False
