"""The file of ``fusec lock``: text for a review, one fact a line, in the order of the program.

Grammar, schema 2; a line that begins with ``#`` is a comment::

    file   ::= 'fusec lock 2'  'made by' versions  'model' TARGET ('input' SPEC)*
               ('train' | 'dynamic' | 'run')* ('option' NAME=VALUE)*  'target' name (',' fact)*
               graph*  ('candidate' choice '->' name)*  'end'
    graph  ::= 'graph' name  'launches' n  'bytes' n  'peak' n  ('loop' rows 'rows by' chunk)*
               kernel* call*
    kernel ::= 'kernel' operations [',' n 'times'] ('computes' part)+ 'bytes' n ['sums' how]
               ['members' n]
    call   ::= 'call' operation 'in' library [',' n 'times'] 'computes' part 'because' reason
               'bytes' n
    part   ::= operation ['of' module] ['at' line]

A file is read as strictly as it is written: a line that would be written otherwise is an error,
which names it. A file of another schema is an error, too.

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

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from fusec.driver.stages import CompileContext
from fusec.errors import UsageError
from fusec.frontend.fx_passes.memory_formats import CHANNELS_LAST, CONTIGUOUS, DECISION
from fusec.ir.choice import Choice, Decided, Judge, judge_by_rule
from fusec.passes.fusion.contract import FUSED, LIBRARY
from fusec.tools.report.lock import Asked, Lock, LockedCall, LockedGraph, LockedKernel, Part

# -- candidates ------------------------------------------------------------------------------------


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


# -- the text --------------------------------------------------------------------------------------


SCHEMA = 2
FIRST = f"fusec lock {SCHEMA}"
FLAGS = ("train", "dynamic", "run")
_HEAD = "# What fusec makes of a model. `fusec lock --check FILE` compares, and says what changed."
_PART = re.compile(r"(?P<op>\S+)(?: of (?P<module>.+?))?(?: at (?P<line>.+))?")
_TIMES = re.compile(r"(.*?)(?:, (\d+) times)?")
_LAST = "end"
_ARROW = " -> "
MOST_DIGITS = 20
"""More digits than a number of bytes has."""


def print_lock(lock: Lock) -> str:
    """Return the text of a file."""
    return "\n".join([FIRST, _HEAD, *_lines(lock)]) + "\n"


def _lines(lock: Lock) -> Iterator[str]:
    asked = lock.asked
    yield f"made by {lock.made_by}"
    yield f"model {asked.model}"
    yield from (f"input {spec}" for spec in asked.inputs)
    yield from asked.flags
    yield from (f"option {option}" for option in asked.options)
    yield f"target {lock.target}"
    for graph in lock.graphs:
        yield from ("", f"graph {graph.name}", f"  launches {graph.launches}")
        yield from (f"  bytes {graph.bytes:,}", f"  peak {graph.peak:,}")
        yield from (f"  loop {loop}" for loop in graph.loops)
        for kernel in graph.kernels:
            yield from ("", *_kernel_lines(kernel))
        for call in graph.calls:
            yield from ("", *_call_lines(call))
    if lock.choices:
        yield ""
    yield from (f"candidate {choice}{_ARROW}{name}" for choice, name in lock.choices)
    yield from ("", _LAST)


def _kernel_lines(kernel: LockedKernel) -> Iterator[str]:
    yield f"  kernel {kernel.title}{_times(kernel.times)}"
    yield from map(_part_line, kernel.parts)
    yield f"    bytes {kernel.bytes:,}"
    if kernel.sums:
        yield f"    sums {kernel.sums}"
    if kernel.members > 1:
        yield f"    members {kernel.members}"


def _call_lines(call: LockedCall) -> Iterator[str]:
    yield f"  call {call.title} in {call.library}{_times(call.times)}"
    yield _part_line(call.part)
    yield f"    because {call.reason}"
    yield f"    bytes {call.bytes:,}"


def _times(times: int) -> str:
    return f", {times} times" if times > 1 else ""


def _part_line(part: Part) -> str:
    where = f" of {part.module}" if part.module else ""
    return f"    computes {part.op}{where}" + (f" at {part.line}" if part.line else "")


# -- read ------------------------------------------------------------------------------------------


def parse_lock(text: str, name: str) -> Lock:
    """Parse a file.

    Args:
        name: of the file, for messages.
    Raises:
        UsageError: if ``print_lock`` would not write it, with the line at fault.
    """
    numbered = enumerate(text.splitlines(), 1)
    lines = _Lines(name, [(k, line) for k, line in numbered if line.strip() and line[0] != "#"])
    if lines.may(FIRST) != "":
        raise lines.wrong(f"a lock that this fusec reads begins with {FIRST!r}")
    lock = _read(lines)
    lines.take(_LAST)
    if not lines.ended:
        raise lines.wrong("that belongs nowhere here")
    lines.check(list(_lines(lock)))
    return lock


@dataclass(slots=True)
class _Lines:
    """A cursor over the numbered lines of a file, without comments and empty lines.

    Attributes:
        name: of the file.
        at: how many were read.
    """

    name: str
    rows: list[tuple[int, str]]
    at: int = 0

    @property
    def ended(self) -> bool:
        return self.at >= len(self.rows)

    def wrong(self, why: str, at: int | None = None) -> UsageError:
        """Return the error for a line, by default the next one."""
        at = self.at if at is None else at
        number, seen = self.rows[at] if at < len(self.rows) else (0, "")
        place = f"line {number}, {seen.strip()!r}" if number else "its end"
        return UsageError(
            f"{self.name!r} is no file of `fusec lock`, at {place}: {why}. "
            "`fusec lock TARGET ... -o FILE` writes one."
        )

    def take(self, word: str) -> str:
        """Return the text after a word, with which the next line has to begin."""
        found = self.may(word)
        if found is None:
            raise self.wrong(f"{word.strip()!r} belongs here")
        return found

    def may(self, word: str) -> str | None:
        """Return the text after a word, if the next line begins with that; else None."""
        if self.ended or not f"{self.rows[self.at][1]} ".startswith(f"{word} "):
            return None
        self.at += 1
        return self.rows[self.at - 1][1][len(word) + 1 :]

    def several(self, word: str) -> tuple[str, ...]:
        """Return the texts after a word on all lines from here on that begin with it."""
        found = []
        while (text := self.may(word)) is not None:
            found.append(text)
        return tuple(found)

    def number(self, word: str) -> int:
        """Return the number after a word."""
        return self.whole(self.take(word))

    def whole(self, text: str) -> int:
        """Parse a number on the last line."""
        digits = text.replace(",", "")
        if not (digits.isascii() and digits.isdigit() and len(digits) < MOST_DIGITS):
            raise self.wrong(f"{text!r} is no number", self.at - 1)
        return int(digits)

    def check(self, written: Sequence[str]) -> None:
        """Raise UsageError at the first line that would be written otherwise."""
        for at, right in enumerate([FIRST, *(line for line in written if line)]):
            if self.rows[at][1] != right:
                raise self.wrong(f"it would be written {right.strip()!r}", at)


def _read(lines: _Lines) -> Lock:
    made_by = lines.take("made by")
    model, inputs = lines.take("model"), lines.several("input")
    flags = tuple(flag for flag in FLAGS if lines.may(flag) is not None)
    asked = Asked(model, inputs, flags, lines.several("option"))
    target = lines.take("target")
    graphs = []
    while (name := lines.may("graph")) is not None:
        graphs.append(_graph(lines, name))
    return Lock(made_by, asked, target, tuple(graphs), tuple(_choices(lines)))


def _graph(lines: _Lines, name: str) -> LockedGraph:
    launches, size, peak = (lines.number(f"  {w}") for w in ("launches", "bytes", "peak"))
    loops = lines.several("  loop")
    kernels, calls = [], []
    while (text := lines.may("  kernel")) is not None:
        kernels.append(_kernel(lines, text))
    while (text := lines.may("  call")) is not None:
        calls.append(_call(lines, text))
    return LockedGraph(name, launches, size, peak, tuple(kernels), tuple(calls), loops)


def _kernel(lines: _Lines, text: str) -> LockedKernel:
    times = _read_times(lines, text)[1]
    parts = [_part(lines, lines.take("    computes"))]
    while (part := lines.may("    computes")) is not None:
        parts.append(_part(lines, part))
    size = lines.number("    bytes")
    sums, members = lines.may("    sums") or "", lines.may("    members")
    return LockedKernel(tuple(parts), size, sums, lines.whole(members or "1"), times)


def _call(lines: _Lines, text: str) -> LockedCall:
    called, times = _read_times(lines, text)
    op, _, library = called.rpartition(" in ")
    part = _part(lines, lines.take("    computes"))
    reason = lines.take("    because")
    return LockedCall(op, part, library, reason, lines.number("    bytes"), times)


def _read_times(lines: _Lines, text: str) -> tuple[str, int]:
    found = _TIMES.fullmatch(text)
    assert found is not None  # it matches any text of one line
    return found[1], lines.whole(found[2] or "1")


def _part(lines: _Lines, text: str) -> Part:
    found = _PART.fullmatch(text)
    if found is None:
        raise lines.wrong("it names no operation", lines.at - 1)
    return Part(found["op"], found["module"] or "", found["line"] or "")


def _choices(lines: _Lines) -> Iterator[tuple[str, str]]:
    while (text := lines.may("candidate")) is not None:
        choice, _, name = text.rpartition(_ARROW)
        if not is_candidate(choice, name):
            raise lines.wrong("it names no candidate that exists", lines.at - 1)
        yield choice, name
