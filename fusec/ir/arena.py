"""Static memory of a schedule: one block of bytes with an offset for each buffer.

A host program (``ir/host.py``) gives the lifetime of a buffer and the buffer whose memory it
reuses; where there is no allocator, an arena also gives the offset. Buffers that are computed in
the caller's result tensors are not in the arena.

Worked example: ``k0: x -> a``, ``k1: a -> b``, ``k2: b -> c``, each of 100 bytes, c returned::

    a at 0    b at 128    c: result 0

Where sizes are symbolic, offsets are those at their hints, and only the order holds for all other
sizes: b begins after the end of a, wherever that is. So an arena lists the buffers below each
buffer; of any two that are live at once, one is below the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
