"""Static memory of a schedule: one block of bytes with an offset for each buffer.

A host program (``ir/host.py``) gives the lifetime of a buffer and the buffer whose memory it
reuses; where there is no allocator, an arena also gives the offset. Buffers that are computed in
the caller's result tensors are not in the arena.

Worked example: ``k0: x -> a``, ``k1: a -> b``, ``k2: b -> c``, each of 100 bytes, c returned::

    a at 0    b at 128    c: result 0

Where sizes are symbolic, offsets are those at their hints, and only the order holds for all other
sizes: b begins after the end of a, wherever that is. So an arena lists the buffers below each
buffer; of any two that are live at once, one is below the other.

Buffers that the program puts over each other share a slot. The largest slots are placed first, each
at the lowest offset where it overlaps no slot that is live at the same time: within a few percent
of the peak in practice (the order is that of TensorFlow Lite's "greedy by size", Pisarchyk and Lee,
2020). At other sizes than the hints each slot begins behind the last end of the slots below it that
are live with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusec.ir.expr import Buffer
from fusec.ir.host import Allocation, FreeBuffers, HostProgram
from fusec.ir.memory import bytes_of
from fusec.ir.verify import check

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector."""


@dataclass(frozen=True, slots=True)
class Arena:
    """The offset, or the result tensor, of each buffer that a schedule allocates.

    Attributes:
        offsets: buffer -> its offset in the arena, in bytes, at the hints of sizes.
        below: buffer -> buffers after whose ends it begins. The relation is transitive, so that
            buffers below these may be left out.
        results: buffer -> the index of the result tensor in whose memory it is.
        bytes: the size of the arena.
    """

    offsets: Mapping[Buffer, int]
    below: Mapping[Buffer, tuple[Buffer, ...]]
    results: Mapping[Buffer, int]
    bytes: int


def upwards(arena: Arena) -> list[Buffer]:
    """Return the buffers of an arena by offset, so that each follows the buffers below it."""
    return sorted(arena.offsets, key=lambda b: (arena.offsets[b], bytes_of(b)))


@dataclass(slots=True, eq=False)
class _Slot:
    """Memory that several buffers use, one after the other.

    Attributes:
        first, last: the first and last statement at which it is live, inclusive.
    """

    buffers: list[Buffer]
    first: int
    last: int
    offset: int = field(default=0)

    @property
    def end(self) -> int:
        size = max(map(bytes_of, self.buffers))
        return self.offset + -(-size // ALIGNMENT) * ALIGNMENT


def plan_arena(program: HostProgram, results: Mapping[Buffer, int]) -> Arena:
    """Return the offsets of a program's buffers.

    Args:
        results: buffer that lies in the caller's memory for a result -> number of that result.
    """
    placed: list[_Slot] = []
    own: dict[Buffer, int] = {}
    slots = sorted(_slots(program), key=lambda slot: -slot.end)
    for slot in slots:
        number = next((results[b] for b in slot.buffers if b in results), None)
        if number is None:
            slot.offset = _lowest(slot, placed)
            placed.append(slot)
        else:
            own.update(dict.fromkeys(slot.buffers, number))
    offsets = {buffer: slot.offset for slot in placed for buffer in slot.buffers}
    return Arena(offsets, _below(placed), own, max((slot.end for slot in placed), default=0))


def _below(placed: list[_Slot]) -> dict[Buffer, tuple[Buffer, ...]]:
    """Return buffer -> buffers that it must begin behind, without transitively implied ones."""
    order = sorted(placed, key=lambda slot: (slot.offset, slot.end))
    reached: list[set[int]] = []
    found: dict[Buffer, tuple[Buffer, ...]] = {}
    for k, slot in enumerate(order):
        under = {j for j in range(k) if _live_together(order[j], slot)}
        known = set().union(*(reached[j] for j in under))
        reached.append(under | known)
        lasting = tuple(b for j in sorted(under - known) for b in order[j].buffers)
        found.update(dict.fromkeys(slot.buffers, lasting))
    return found


def _live_together(one: _Slot, other: _Slot) -> bool:
    return one.first <= other.last and other.first <= one.last


def _slots(program: HostProgram) -> list[_Slot]:
    slots: list[_Slot] = []
    of: dict[Buffer, _Slot] = {}
    end = len(program.statements)
    for position, statement in enumerate(program.statements):
        match statement:
            case Allocation(buffer, None):
                of[buffer] = _Slot([buffer], position, end)
                slots.append(of[buffer])
            case Allocation(buffer, Buffer() as over):
                of[buffer] = of[over]
                of[buffer].buffers.append(buffer)
                of[buffer].last = end
            case FreeBuffers(buffers):
                for buffer in buffers:
                    if buffer in of and of[buffer].buffers[-1] is buffer:
                        of[buffer].last = position
    return slots


def _lowest(slot: _Slot, placed: list[_Slot]) -> int:
    """Return the least offset at which a slot overlaps none that is live at the same time."""
    beside = [s for s in placed if _live_together(s, slot)]
    offset, size = 0, slot.end - slot.offset
    for other in sorted(beside, key=lambda s: s.offset):
        if offset + size <= other.offset:
            break
        offset = max(offset, other.end)
    return offset


# -- verification ----------------------------------------------------------------------------------


def verify_arena(program: HostProgram, arena: Arena) -> None:
    """Check that no two buffers that are live at once share a byte, for all values of sizes.

    Raises:
        InvalidIR: naming the statement and the buffers.
    """
    beneath = _all_below(arena)
    present: dict[Buffer, None] = {}
    for position, statement in enumerate(program.statements):
        line = f"statement {position}"
        match statement:
            case Allocation(buffer, over):
                present[buffer] = None
                nowhere = buffer not in arena.results and buffer not in arena.offsets
                check(not nowhere, line, f"{buffer} is nowhere")
                if over is not None:
                    present.pop(over, None)
            case FreeBuffers(buffers):
                for buffer in buffers:
                    present.pop(buffer, None)
            case _:
                _check_apart(tuple(present), arena, line)
                _check_ordered([b for b in present if b in arena.offsets], beneath, line)


def _check_apart(present: tuple[Buffer, ...], arena: Arena, line: str) -> None:
    rows = sorted((arena.offsets[b], bytes_of(b), b.name) for b in present if b in arena.offsets)
    end, owner = 0, ""
    for offset, size, name in rows:
        check(offset % ALIGNMENT == 0, line, f"{name} begins at {offset}")
        check(offset >= end or not size, line, f"{name} lies where {owner} does")
        end, owner = max((end, owner), (offset + size, name))
    check(end <= arena.bytes, line, f"{owner} ends at {end} of {arena.bytes} bytes")
    taken = [arena.results[b] for b in present if b in arena.results]
    check(len(set(taken)) == len(taken), line, "two buffers lie in one result")


def _all_below(arena: Arena) -> dict[Buffer, frozenset[Buffer]]:
    """Return the buffers below each buffer: the transitive closure of ``arena.below``."""
    found: dict[Buffer, frozenset[Buffer]] = {}
    for buffer in upwards(arena):
        under = arena.below[buffer]
        known = all(b in found and bytes_of(b) + arena.offsets[b] <= arena.offsets[buffer]
                    for b in under)  # fmt: skip
        check(known, "the arena", f"{buffer} does not begin behind what it has below it")
        found[buffer] = frozenset(under).union(*(found[b] for b in under))
    return found


def _check_ordered(
    present: list[Buffer], beneath: Mapping[Buffer, frozenset[Buffer]], line: str
) -> None:
    for k, one in enumerate(present):
        for other in present[:k]:
            ordered = other in beneath[one] or one in beneath[other]
            check(ordered, line, f"neither {one} nor {other} is below the other")
