"""Decode what moves or multiplies tiles: asynchronous copies, tensor cores, tensor memory.

``rules`` has the other opcodes, and the table of all. A rule gets an instruction, and a function
that returns the declared type of a register; it returns the instruction's ``Row``, or None for a
form that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fusec.errors import InternalError
from fusec.tools.emulator.parse import Address, Instruction, Literal, Operand, Vector
from fusec.tools.emulator.vocabulary import CODES, FLAG

# -- rows ------------------------------------------------------------------------------------------


Kind = Callable[[Operand], str]


@dataclass(frozen=True, slots=True)
class Row:
    """A decoded instruction, before its operands have offsets; see ``engine/program.h``.

    Attributes:
        operands: an integer is a constant.
        target: the label of a branch, or of its table.
    """

    operation: str
    operands: tuple[Operand | int, ...] = ()
    type: int = 0
    source: int = 0
    choice: int = 0
    flags: int = 0
    count: int = 0
    target: str = ""


Rule = Callable[[Instruction, Kind], Row | None]


# -- copies: cp.async, boxes by tensor maps, and groups of them ------------------------------------


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
    """Return the row of a ``cp``, or of a ``cp.reduce`` that adds."""
    if one.opcode[1] == "reduce":
        return _bulk(replace(one, opcode=tuple(w for w in one.opcode if w != "reduce")))
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
        return _bulk_store(operands, rank, 0)
    if rest[:3] == ("global", "shared_cta", "add") and set(rest[3:]) <= {"bulk_group", "tile"}:
        return _bulk_store(operands, rank, FLAG["ADDS"])
    return None


def _bulk_store(operands: tuple[Operand, ...], rank: int, flags: int) -> Row:
    map_, coordinates = _tensor(operands[0])
    return Row("bulk_store", (map_, operands[1], *coordinates), flags=flags, count=rank)


def _tensor(operand: Operand) -> tuple[Operand, tuple[Operand, ...]]:
    """Return the address of a tensor map, and the coordinates beside it."""
    if not isinstance(operand, Address):
        raise InternalError(f"{operand} is no place in a tensor")
    return replace(operand, coordinates=()), operand.coordinates


# -- products: mma, wgmma, tcgen05 -----------------------------------------------------------------


_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1}
_FACTORS = {name: CODES[name.upper()] for name in _BYTES}
_FLOATS8 = {"e4m3", "e5m2"}

_SCALED = {
    ("m16n8k32", "mxf8f6f4", "1X", "ue8m0"): ("e4m3", "e5m2"),
    ("m16n8k64", "mxf4", "2X", "ue8m0"): ("e2m1",),
    ("m16n8k64", "mxf4nvf4", "2X", "ue8m0"): ("e2m1",),
    ("m16n8k64", "mxf4nvf4", "4X", "ue4m3"): ("e2m1",),
}
"""Shape, kind, scales of a row and their type -> the types of factors."""


def _mma_scaled(one: Instruction) -> Row | None:
    shape, kind, scales, (*types, scale) = one.opcode[3], *one.opcode[6:9:2], one.opcode[9:]
    scales = scales.removeprefix("scale_vec_")
    factors = _SCALED.get((shape, kind.removeprefix("kind_"), scales, scale), ())
    if types[::3] != ["f32", "f32"] or not set(types[1:3]) <= set(factors):
        return None
    left, right, scale_type = (CODES[name.upper()] for name in (*types[1:3], scale))
    return Row("mma_scaled", one.operands, left, right, scale_type, count=int(scales[0]))


def _multiply(left: str, right: str, *sums: str) -> bool:
    """Return True for types of factors: one for both, unless these are floats of 8 bits.

    Args:
        sums: the types of what they are added to: s32 of integers, otherwise f32.
    """
    known = left in _FACTORS and set(sums) == {"s32" if left == "s8" else "f32"}
    return known and (left == right or {left, right} <= _FLOATS8)


def mma_rule(one: Instruction, _: Kind) -> Row | None:
    """Return the row of a product of fragments in registers."""
    words = tuple(word for word in one.opcode if word != "satfinite")  # of s32: 2^17 terms and more
    if words[1:3] != ("sync", "aligned") or words[4:6] != ("row", "col"):
        return None
    if "block_scale" in words:
        return _mma_scaled(one)
    if words[3] == "m8n8k4" and set(words[6:]) == {"f64"}:
        return Row("mma_f64", one.operands)
    if not _multiply(*words[7:9], words[6], words[9]):
        return None
    left = one.operands[1]
    shape = words[3].split("k")
    if shape[0] != "m16n8" or not isinstance(left, Vector):
        return None
    if int(shape[1]) * _BYTES[words[7]] != 8 * len(left.parts):
        return None
    source, other = _FACTORS[words[7]], _FACTORS[words[8]]
    return Row("mma", one.operands, source=source, choice=other, count=len(left.parts))


def wgmma_rule(one: Instruction, _: Kind) -> Row | None:
    """Return the row of a product of a warp group, of its fence or of its groups."""
    words = one.opcode
    if words[1] == "fence":
        return Row("wgmma_fence")
    if words[1] != "mma_async":
        return group(one, "PRODUCTS")
    shape, (sums, *factors) = words[4], words[5:8]
    n = int(shape.partition("n")[2].partition("k")[0])
    if not _multiply(*factors, sums):
        return None
    d, a, b, add, *rest = one.operands
    flags, signs = 0, [int(r.bits) for r in rest[:2] if isinstance(r, Literal)]
    in_registers = isinstance(a, Vector)
    flags |= FLAG["FROM_REGISTERS"] if in_registers else 0
    flags |= FLAG["NEGATES"] if signs and signs[0] * signs[1] < 0 else 0
    orders = [int(r.bits) for r in rest[2:] if isinstance(r, Literal)]
    if _BYTES[factors[0]] == 2 and in_registers:
        orders = [0, *orders]
    for order, name in zip(orders, ("LEFT_TRANSPOSED", "RIGHT_TRANSPOSED"), strict=False):
        flags |= FLAG[name] if order else 0
    source, other = _FACTORS[factors[0]], _FACTORS[factors[1]]
    return Row("wgmma", (d, a, b, add), source=source, choice=other, flags=flags, count=n)


# -- tensor memory ---------------------------------------------------------------------------------

_KINDS = {
    "kind_f16": ("F16", 0),
    "kind_tf32": ("TF32", 0),
    "kind_f8f6f4": ("E4M3", 0),
    "kind_mxf8f6f4.block_scale.scale_vec_1X": ("E4M3", 1),
    "kind_mxf4.block_scale.scale_vec_2X": ("E2M1", 2),
    "kind_mxf4nvf4.block_scale.scale_vec_2X": ("E2M1", 2),
    "kind_mxf4nvf4.block_scale.scale_vec_4X": ("E2M1", 4),
}
"""What a product's descriptor chooses a type of, and the scales of 32 bytes of a row."""
_PLAIN = {
    "alloc.cta_group_1.sync.aligned.shared_cta.b32": "tensor_alloc",
    "dealloc.cta_group_1.sync.aligned.b32": "tensor_dealloc",
    "relinquish_alloc_permit.cta_group_1.sync.aligned": "tensor_relinquish",
    "wait_ld.sync.aligned": "tensor_wait_load",
    "wait_st.sync.aligned": "tensor_wait_store",
    "commit.cta_group_1.mbarrier_arrive_one.shared_cluster.b64": "tensor_commit",
    "fence_before_thread_sync": "nothing",
    "fence_after_thread_sync": "nothing",
}


def tensor_rule(one: Instruction, _: Kind) -> Row | None:
    """Return the row of an instruction of tensor memory (tcgen05), of one block."""
    name = ".".join(one.opcode[1:])
    if name in _PLAIN:
        return Row(_PLAIN[name], one.operands)
    if one.opcode[1] in ("ld", "st"):
        return _tensor_access(one)
    kind, scales = _KINDS.get(".".join(one.opcode[3:]), ("", 0))
    if one.opcode[1:3] != ("mma", "cta_group_1") or not kind:
        return None
    if len(one.operands) != (7 if scales else 5):
        return None
    flags = FLAG["FROM_TENSOR"] if isinstance(one.operands[1], Address) else 0
    return Row("tensor_mma", one.operands, source=CODES[kind], flags=flags, count=scales)


def _tensor_access(one: Instruction) -> Row | None:
    loads, shape, number = one.opcode[1] == "ld", one.opcode[4], one.opcode[5]
    operands = list(one.operands)
    values = next((o for o in operands if isinstance(o, Vector)), Vector(()))
    if one.opcode[2:4] != ("sync", "aligned") or shape not in ("32x32b", "16x32bx2"):
        return None
    if one.opcode[6:] != ("b32",) or number != f"x{len(values.parts)}":
        return None
    halved = shape == "16x32bx2"
    address = next(o for o in operands if isinstance(o, Address))
    apart = next((o for o in operands if isinstance(o, Literal)), 0)
    place = (address, apart)
    return Row(
        "tensor_load" if loads else "tensor_store",
        (values, *place) if loads else (*place, values),
        choice=int(halved),
        count=len(values.parts),
    )
