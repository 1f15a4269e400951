"""The file of ``fusec lock``: JSON for a review, one fact a line, in the order of the program.

Its form, 3, has the fields of ``Lock``::

    {
     "fusec lock": 3,
     "made_by": "fusec 0.2.0, torch 2.13.0",
     "asked": ["model.py:Block", "--input", "bf16[8,128,768]", "--train"],
     "target": "sm_90",
     "graphs": [{"name", "launches", "bytes", "peak", "kernels": [...], "calls": [...], "loops"}],
     "choices": [{"choice", "candidate"}]
    }

Which candidate is fastest depends on the machine: a kernel of fusec's own in one of its
configurations, or one of several libraries; a memory format of images. ``Record`` wraps the judge
of a compile and notes its decisions. ``Pinned`` decides as a record says, times nothing, and
decides by rule where the record has no entry. An entry is two texts, the choice and its candidate::

    group 5f0c2d1e9a7b3c44 mm + gelu                                           fused #2
    product mm.default f32[512,768](768,1) f32[768,3072](1,768)                oneDNN
    convolution convolution.default float32[4,16,32,32] ...                    channels-last

A group's number is a digest of its structure, the same in every process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from fusec.driver.context import CompileContext
from fusec.errors import UsageError
from fusec.frontend.fx_passes.fx_nodes import DECISIONS
from fusec.frontend.fx_passes.memory_formats import CHANNELS_LAST, CONTIGUOUS
from fusec.ir.choice import Choice, Decided, Judge, judge_by_rule
from fusec.passes.fusion.contract import FUSED, LIBRARY
from fusec.runtime.from_json import read
from fusec.tools.report.lock import Lock

KEY, FORM = "fusec lock", 3
"""The first field of a file."""

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
            decisions = (d for node in nodes for d in node.meta.get(DECISIONS, ()))
            taken = [d.taken for d in decisions if d.b == CHANNELS_LAST]
            formats = [CHANNELS_LAST if last else CONTIGUOUS for last in taken]
            for number, name in enumerate(formats):  # another component may decide otherwise
                if number == 0 or name != formats[0]:
                    decided[_numbered(choice, number)] = name
        return dict(sorted(decided.items()))

    def around(self, context: CompileContext) -> CompileContext:
        """Return a context whose judge takes pinned candidates, and is recorded."""
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
        """Return a context whose judge takes pinned candidates, else decides by rule."""
        return super().around(replace(context, judge=judge_by_rule))


def _numbered(choice: str, number: int) -> str:
    """Return the key of a convolution that differs from the first of the same arguments."""
    return f"{choice} #{number}" if number else choice


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


# -- the text --------------------------------------------------------------------------------------


def print_lock(lock: Lock) -> str:
    """Return the text of a file."""
    return f"{_printed({KEY: FORM, **_data(lock)})}\n"


def _data(value: Any) -> Any:
    """Return a record as dictionaries and lists, without fields that comparison leaves out."""
    if is_dataclass(value):
        return {f.name: _data(getattr(value, f.name)) for f in fields(value) if f.compare}
    return list(map(_data, value)) if isinstance(value, tuple) else value


def _printed(value: Any, margin: str = "") -> str:
    """Return JSON in which a dictionary or list of plain values is one line."""
    is_dict = isinstance(value, dict)
    inside = list(value.values()) if is_dict else value
    if not isinstance(value, dict | list) or not any(isinstance(v, dict | list) for v in inside):
        return json.dumps(value, ensure_ascii=False)
    names = [f"{json.dumps(name)}: " for name in value] if is_dict else [""] * len(inside)
    rows = (f"{margin} {n}{_printed(v, margin + ' ')}" for n, v in zip(names, inside, strict=True))
    first, last = "{}" if is_dict else "[]"
    return "\n".join((first, ",\n".join(rows), f"{margin}{last}"))


def parse_lock(text: str, name: str) -> Lock:
    """Parse a file.

    Args:
        name: of the file, for messages.
    Raises:
        UsageError: if ``print_lock`` does not write such a file.
    """
    try:
        found = json.loads(text)
        form = found.get(KEY) if isinstance(found, dict) else None
        if form != FORM:
            raise ValueError(f"its form is {form!r}, and this fusec reads {FORM}")
        lock: Lock = read(Lock, found, "a lock")
        for one in lock.choices:
            if not is_candidate(one.choice, one.candidate):
                raise ValueError(f"{one.candidate!r} of {one.choice!r} is no candidate that exists")
        return lock
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{name!r} is no file of `fusec lock`: {error}. "
            "`fusec lock TARGET ... -o FILE` writes one."
        ) from error
