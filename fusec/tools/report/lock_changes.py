"""Describe the changes between a lock and the current compile, in words.

Kernels are matched by what they compute: first by operations, modules and lines (their numbers
aside), then by operations and modules, then by operations alone. So a line that was moved or
rewritten, or a module that was renamed, is no change. The rest are changes of fusion: a kernel
whose operations are in several ones now was split, and the decision between these, or a new launch
between them, is the reason; several kernels whose operations are in one were merged.

A change names the line that the lock does not have, if there is one: a new line is most likely the
cause. Else it names the first line of the part that was lost.

The JSON form, schema 1, is stable: fields are added, never renamed or removed::

    {"schema": 1, "lock": the file's name, "changes": [text]}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from fusec.ir.decision import Decision
from fusec.passes.fusion.fuse import DETOUR
from fusec.tools.report.breaks import Break
from fusec.tools.report.lock import Lock, LockedCall, LockedGraph, LockedKernel, Part, title
from fusec.tools.terminal import Report, format_bytes

Entry: TypeAlias = LockedKernel | LockedCall
_Kind = TypeVar("_Kind", LockedKernel, LockedCall)


@dataclass(frozen=True, slots=True)
class Changes(Report):
    """The result of a check.

    Attributes:
        found: each change as a sentence.
        versions: those of the lock and of now, where they differ.
    """

    name: str
    found: tuple[str, ...]
    versions: tuple[str, str] | None = None
    again: str = ""

    def text(self, *, whole: bool = False) -> str:
        if not self.found:
            return f"{self.name}: as it was"
        count = f"{len(self.found)} change{'s' * (len(self.found) > 1)}"
        lines = [f"{self.name}: {count}", *(f"  {line}" for line in self.found)]
        if self.versions is not None:
            lines.append(f"  the lock is by {self.versions[0]}; this is {self.versions[1]}")
        return "\n".join([*lines, f"if that is meant: {self.again}"] if self.again else lines)

    def to_dict(self) -> dict[str, Any]:
        return {"lock": self.name, "changes": self.found}


def compare_locks(old: Lock, new: Lock, breaks: Sequence[Break] = ()) -> tuple[str, ...]:
    """Return the changes, the causes first.

    Args:
        breaks: the current graph breaks.
    """
    found: list[str] = []
    if old.target != new.target:
        found.append(f"target: {new.target}, was {old.target}")
    before = {graph.name: graph for graph in old.graphs}
    now = {graph.name: graph for graph in new.graphs}
    if before.keys() != now.keys():
        found += (f"{b.place}: {b.said}" for b in breaks)
    found += (f"graph {name} is gone" for name in before if name not in now)
    found += (f"graph {name} is new" for name in now if name not in before)
    for name, graph in now.items():
        if name in before:
            found += (f"{name}: {change}" for change in _graph_changes(before[name], graph))
    chosen = {one.choice: one.candidate for one in new.choices}
    found += (
        f"{was.choice}: {chosen[was.choice]}, was {was.candidate}"
        for was in old.choices
        if chosen.get(was.choice, was.candidate) != was.candidate
    )
    return tuple(found)


def _graph_changes(old: LockedGraph, new: LockedGraph) -> Iterator[str]:
    """Yield the changes in one graph."""
    yield from _counted(_Compared(old, new).changes())
    if old.loops != new.loops:
        yield f"loops: {'; '.join(new.loops) or 'none'}; were {'; '.join(old.loops) or 'none'}"
    if old.launches != new.launches:
        yield f"launches: {new.launches}, were {old.launches}"
    yield from _sizes("bytes moved", old.bytes, new.bytes)
    yield from _sizes("peak memory", old.peak, new.peak)


def _sizes(what: str, old: int, new: int) -> Iterator[str]:
    if old != new:
        share = f" ({new / old - 1:+.0%})" if old and abs(new / old - 1) >= 0.005 else ""
        yield f"{what}: {format_bytes(new)}, was {format_bytes(old)}{share}"


def _counted(found: Iterable[str]) -> Iterator[str]:
    """Yield each sentence once, with how often it holds."""
    for sentence, times in Counter(found).items():
        yield f"{sentence} ({times} times)" if times > 1 else sentence


@dataclass(frozen=True, slots=True)
class _Piece:
    """A new kernel, and the parts of an earlier one that it computes."""

    kernel: LockedKernel
    parts: tuple[Part, ...]


class _Compared:
    """The launches of one graph, before and now, with those that match set apart.

    Attributes:
        lost, gained: kernels, one by one, that are gone, and that are new.
        gone, come: eager kernels, likewise.
        known: the code of all lines that the lock has.
    """

    def __init__(self, old: LockedGraph, new: LockedGraph) -> None:
        self.new = new
        self.known = {part.code for entry in old.entries for part in entry.parts}
        self.same: list[tuple[Entry, Entry]] = []
        lost, gained = _one_by_one(old.kernels), _one_by_one(new.kernels)
        gone, come = _one_by_one(old.calls), _one_by_one(new.calls)
        for key in (_by_lines, _places, lambda one: {part.op for part in one.parts}):
            self.same += [*_take_equal(lost, gained, key), *_take_equal(gone, come, key)]
        self.lost, self.gained, self.gone, self.come = lost, gained, gone, come

    def changes(self) -> Iterator[str]:
        """Yield the changes: new eager kernels, then merges and splits of kernels, then details."""
        for call in self.come:
            yield f"`{call.title}` is an eager kernel now: {call.reason}{_at(call.parts)}"
        yield from self._merged()
        yield from self._taken_apart()
        for call in self.gone:
            yield f"`{call.title}` is no eager kernel any more{_at(call.parts)}"
        for kernel in self.gained:
            yield f"a kernel is new: `{kernel.title}`{_at(self._new_first(kernel.parts))}"
        for before, now in self.same:
            yield from _details(before, now)

    def _merged(self) -> Iterator[str]:
        """Yield which kernels became one, and take them out of the lists."""
        for whole in list(self.gained):
            parts = _places(whole)
            inside = [k for k in self.lost if _places(k) <= parts]
            if len(inside) > 1 and parts <= frozenset().union(*map(_places, inside)):
                names = " and ".join(_names([k.parts for k in inside]))
                yield f"{names} fuse now{_at(whole.parts)}"
                self.gained.remove(whole)
                for kernel in inside:
                    self.lost.remove(kernel)

    def _taken_apart(self) -> Iterator[str]:
        """Yield what became of each kernel that is gone."""
        for kernel in self.lost:
            pieces = self._pieces(kernel)
            for piece in pieces:
                self.gained.remove(piece.kernel)
            yield from self._became(kernel, pieces)

    def _pieces(self, kernel: Entry) -> list[_Piece]:
        """Return the new kernels that compute a former one's parts, in the order of the program."""
        missing, pieces = list(kernel.parts), list[_Piece]()
        free = list(self.gained)
        while missing and free:
            best = max(free, key=lambda one: sum(p.place in _places(one) for p in missing))
            here = [part for part in missing if part.place in _places(best)]
            if not here:
                break
            pieces.append(_Piece(best, tuple(here)))
            free.remove(best)
            missing = [part for part in missing if part not in here]
        return sorted(pieces, key=lambda piece: self.gained.index(piece.kernel))

    def _became(self, kernel: Entry, pieces: Sequence[_Piece]) -> Iterator[str]:
        """Yield what one kernel became: several, a smaller or a larger one, or none."""
        if not pieces:
            yield f"`{kernel.title}` has no kernel of its own any more{_at(kernel.parts)}"
            return
        names = _names([piece.parts for piece in pieces])
        for number in range(len(pieces) - 1):
            why = self._why(pieces[number].kernel, pieces[number + 1].kernel)
            yield f"{names[number]} no longer fuses with {names[number + 1]}: {why}"
        left = _places(kernel) - {part.place for piece in pieces for part in piece.parts}
        dropped = [part for part in kernel.parts if part.place in left]
        if dropped:
            yield f"`{title(dropped)}` is not computed with {names[0]} any more{_at(dropped)}"
        added = [p for p in pieces[0].kernel.parts if p.place not in _places(kernel)]
        if added and len(pieces) == 1:
            yield f"`{title(added)}` is computed with {names[0]} now{_at(self._new_first(added))}"

    def _why(self, first: LockedKernel, second: LockedKernel) -> str:
        """Return why two kernels are not one, and the line to look at."""
        parts = self._new_first([*first.parts, *second.parts])
        if not self._is_new(parts[0]):
            parts = list(second.parts)
        decision = decision_between(self.new.decisions, first, second)
        reason = reason_of(decision)
        if decision is None or decision.reason == DETOUR:
            launches: list[Entry] = [*self.come, *self.gained]
            fresh = [part for one in launches for part in one.parts if self._is_new(part)]
            fresh = fresh or [part for call in self.come for part in call.parts]
            reason += f"; new is `{fresh[0].op}`" if fresh else ""
            parts = fresh or parts
        return f"{reason}{_at(self._new_first(parts))}"

    def _is_new(self, part: Part) -> bool:
        return bool(part.line) and part.code not in self.known

    def _new_first(self, parts: Sequence[Part]) -> list[Part]:
        """Return parts, those on lines that the lock does not have first."""
        return sorted(parts, key=lambda part: not self._is_new(part))


def decision_between(decisions: Iterable[Decision], first: Entry, second: Entry) -> Decision | None:
    """Return the decision about two separate kernels, or None if fusion never considered them."""
    for decision in decisions:
        a, b = ({*names.split("+")} for names in (decision.a, decision.b))
        for one, other in ((first, second), (second, first)):
            if a & one.buffers and b & other.buffers:
                return decision
    return None


def reason_of(decision: Decision | None) -> str:
    """Return why two kernels are separate."""
    if decision is None:
        return "the one reads nothing that the other makes or reads"
    if decision.saved_us is None:
        return decision.reason
    return f"{decision.reason}, by {-decision.saved_us:.3g} us"


def _one_by_one(entries: Iterable[_Kind]) -> list[_Kind]:
    return [replace(entry, times=1) for entry in entries for _ in range(entry.times)]


def _by_lines(entry: Entry) -> object:
    return frozenset((part.place, part.code) for part in entry.parts)


def _take_equal(
    old: list[_Kind], new: list[_Kind], key: Callable[[Entry], object]
) -> Iterator[tuple[Entry, Entry]]:
    """Yield pairs that are equal by a key, and take them out of both."""
    for entry in list(old):
        other = next((one for one in new if key(one) == key(entry)), None)
        if other is not None:
            old.remove(entry)
            new.remove(other)
            yield entry, other


def _details(old: Entry, new: Entry) -> Iterator[str]:
    """Yield the changes in a launch that computes the same as before."""
    name = f"`{new.title}`"
    match old, new:
        case LockedCall(), LockedCall():
            if old.library != new.library:
                yield f"{name} is computed by {new.library}, was by {old.library}{_at(new.parts)}"
            if old.reason != new.reason:
                yield f"{name} is eager for another reason: {new.reason}; was: {old.reason}"
        case LockedKernel(), LockedKernel():
            if old.sums != new.sums:
                yield f"{name} sums in another order: {new.sums}; was: {old.sums}{_at(new.parts)}"
            if old.members != new.members:
                yield f"{name} runs {new.members} alike kernels, was {old.members}"
    for change in _sizes("moves", old.bytes, new.bytes):
        yield f"{name} {change.replace('moves: ', 'moves ')}{_at(new.parts)}"


def _places(entry: Entry) -> frozenset[tuple[str, str]]:
    return frozenset(part.place for part in entry.parts)


def _names(pieces: Sequence[Sequence[Part]]) -> list[str]:
    """Return names of the pieces of a kernel: their modules, if these differ, or operations."""
    modules = [_innermost({part.module for part in parts} - {""}) for parts in pieces]
    told = sum(map(len, modules)) == len({name for found in modules for name in found})
    if told and all(1 <= len(found) <= 2 for found in modules):
        return [" and ".join(f"`{module}`" for module in found) for found in modules]
    return [f"`{title(parts)}`" for parts in pieces]


def _innermost(modules: set[str]) -> list[str]:
    """Return the modules that have no other one of them inside."""
    return sorted(m for m in modules if not any(other.startswith(f"{m}.") for other in modules))


def _at(parts: Sequence[Part]) -> str:
    """Return the first known line of some parts, as the end of a sentence."""
    line = next((part.line for part in parts if part.line), "")
    return f", at {line}" if line else ""
