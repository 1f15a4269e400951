"""Decode asynchronous copies: cp.async, boxes by tensor maps, and groups of them; see ``rules``."""

from __future__ import annotations

from dataclasses import replace

from fusec.errors import InternalError
from fusec.tools.emulator.parse import Address, Instruction, Literal, Operand
from fusec.tools.emulator.row import Kind, Row
from fusec.tools.emulator.vocabulary import CODES, FLAG


def without_hint(one: Instruction) -> tuple[Operand, ...]:
    """Return the operands without a cache hint."""
    return one.operands[:-1] if "L2_cache_hint" in one.opcode else one.operands


def group(one: Instruction, queue: str) -> Row | None:
    """Return the row of a commit of a group, or of a wait for all but some."""
    if "commit_group" in one.opcode:
        return Row("commit", choice=CODES[queue])
    if "wait_all" in one.opcode:
        return Row("wait_group", choice=CODES[queue], count=-1)
    number = one.operands[0] if one.operands else None
    if not isinstance(number, Literal):
        return None
    return Row("wait_group", choice=CODES[queue], count=number.bits)


def copy_rule(one: Instruction, kind: Kind) -> Row | None:
    """Return the row of a ``cp``."""
    words = one.opcode
    if words[1:3] == ("async", "bulk"):
        return group(one, "STORES") if words[3].endswith("_group") else _bulk(one)
    if words[2].endswith("_group") or words[2] == "wait_all":
        return group(one, "COPIES")
    if words[2:4] == ("mbarrier", "arrive"):
        flags = FLAG["UNCOUNTED"] if "noinc" in words else 0
        return Row("cp_async_arrive", one.operands, flags=flags)
    target, source, size, *rest = without_hint(one)
    if words[2] not in ("ca", "cg") or not isinstance(size, Literal):
        return None
    read = rest[0] if rest else size
    flags = FLAG["IGNORES"] if kind(read) == "pred" else 0
    operands = (target, source, size, read)
    return Row("cp_async", operands, flags=flags, count=size.bits)


def _bulk(one: Instruction) -> Row | None:
    words, operands = one.opcode, one.operands
    if words[3] != "tensor" or words[4] not in ("1d", "2d", "3d", "4d", "5d"):
        return None
    rank, rest = int(words[4][0]), words[5:]
    loads = ("shared_cta", "global"), ("shared_cluster", "global")
    if rest[:2] in loads and set(rest[2:]) <= {"mbarrier_complete_tx_bytes", "tile"}:
        to, (map_, coordinates), object_ = operands[0], _tensor(operands[1]), operands[2]
        return Row("bulk_load", (to, map_, object_, *coordinates), count=rank)
    if rest[:2] == ("global", "shared_cta") and set(rest[2:]) <= {"bulk_group", "tile"}:
        map_, coordinates = _tensor(operands[0])
        return Row("bulk_store", (map_, operands[1], *coordinates), count=rank)
    return None


def _tensor(operand: Operand) -> tuple[Operand, tuple[Operand, ...]]:
    """Return the address of a tensor map, and the coordinates beside it."""
    if not isinstance(operand, Address):
        raise InternalError(f"{operand} is no place in a tensor")
    return replace(operand, coordinates=()), operand.coordinates
