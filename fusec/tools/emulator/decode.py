"""Encode instructions as numbers: operation, types, operands as offsets in a warp's register file.

A register of b bytes a lane has 32 * b bytes of the file, a predicate 4: a bit for each lane. An
address is two operands, its base and its offset. A special register is an ordinary register of the
file that is set before a warp starts.

Lanes that diverge at a branch meet again in the first block on all paths to the exit. That is the
branch's immediate postdominator: the immediate dominator in the reversed graph of blocks. The order
of blocks in the text does not tell: LLVM places blocks so that they fall through.

An unknown opcode, or an unknown form of one, raises `UnknownPtx` with its line.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from dataclasses import dataclass

import networkx

from fusec.tools.emulator.faults import UnknownPtx
from fusec.tools.emulator.parse import (
    Address,
    Instruction,
    Kernel,
    Literal,
    Operand,
    Register,
    Symbol,
)
from fusec.tools.emulator.parse import Vector as Parts
from fusec.tools.emulator.rules import RULES
from fusec.tools.emulator.tile_rules import Row
from fusec.tools.emulator.vocabulary import CODES, pipe_of

# -- where lanes meet again ------------------------------------------------------------------------


NOWHERE = -1
"""Lanes that diverge here never reconverge: each path ends by itself."""


def find_meetings(kernel: Kernel) -> dict[int, int]:
    """Map each branch that may diverge to the instruction where lanes reconverge, or to NOWHERE."""
    count = len(kernel.instructions)
    targets = {at: _targets(kernel, one) for at, one in enumerate(kernel.instructions)}
    starts = sorted({0, *kernel.labels.values()} | {at + 1 for at, to in targets.items() if to})
    starts = [start for start in starts if start <= count]
    exit_ = len(starts)
    before: networkx.DiGraph[int] = networkx.DiGraph()
    before.add_node(exit_)
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else count
        following = _following(kernel, targets, starts, exit_, start, end)
        before.add_edges_from((block, number) for block in following)
    meeting = networkx.immediate_dominators(before, exit_)
    found = {}
    for at, to in targets.items():
        if to and (kernel.instructions[at].guard or len(to) > 1):
            block = meeting.get(bisect_right(starts, at) - 1, exit_)  # in an endless loop: nowhere
            found[at] = NOWHERE if block == exit_ else starts[block]
    return found


def _targets(kernel: Kernel, one: Instruction) -> tuple[int, ...]:
    """Return the instructions that an instruction may jump to."""
    if one.opcode[0] not in ("bra", "brx"):
        return ()
    name = one.operands[-1]
    if not isinstance(name, Symbol):
        return ()
    labels = kernel.tables[name.name] if one.opcode[0] == "brx" else (name.name,)
    return tuple(kernel.labels[label] for label in labels if label in kernel.labels)


def _following(
    kernel: Kernel,
    targets: dict[int, tuple[int, ...]],
    starts: list[int],
    exit_: int,
    start: int,
    end: int,
) -> set[int]:
    """Return the successors of a block."""
    if start >= end:
        return {exit_}
    last = kernel.instructions[end - 1]
    found = {bisect_right(starts, to) - 1 for to in targets[end - 1]}
    ends = last.opcode[0] in ("ret", "exit", "trap", "bra", "brx")
    if last.guard is not None or not ends:
        found.add(bisect_right(starts, end) - 1 if end < len(kernel.instructions) else exit_)
    return found or {exit_}


# -- what waits for the launch before --------------------------------------------------------------


_SPACES = {"shared", "shared_cta", "shared_cluster", "local", "param", "const"}


def unordered(kernel: Kernel) -> tuple[Instruction, ...]:
    """Return what a kernel that may start while the launch before it runs must not do.

    On no path from its start may ``griddepcontrol.wait`` come twice, or not before an access to
    global memory, ``griddepcontrol.launch_dependents`` and the end. Warps with roles are started by
    a loop of their own, through which paths lead that none takes: only accesses tell there.
    """
    roles = any(one.opcode[0] == "brx" for one in kernel.instructions)
    found, seen, ways = set[int](), set[tuple[int, bool]](), [(0, False)]
    while ways:
        at, waited = ways.pop()
        if (at, waited) in seen or at >= len(kernel.instructions):
            continue
        seen.add((at, waited))
        one = kernel.instructions[at]
        waits = one.opcode[:2] == ("griddepcontrol", "wait") and one.guard is None
        ends = one.opcode[0] in ("ret", "exit")
        once = (waits and waited) or (ends and not waited)
        early = not waited and (_reaches_memory(one) or one.opcode[:2] == _LAUNCHES)
        if early or (once and not roles):
            found.add(at)
        targets = _targets(kernel, one)
        falls = one.guard is not None or not (ends or targets or one.opcode[0] == "trap")
        ways += [(to, waited or waits) for to in (*targets, *(at + 1,) * falls)]
    return tuple(kernel.instructions[at] for at in sorted(found))


_LAUNCHES = ("griddepcontrol", "launch_dependents")


def _reaches_memory(one: Instruction) -> bool:
    """Return True for an access to global memory, or to memory of an unknown space."""
    if one.opcode[0] in ("cp", "multimem"):
        return "global" in one.opcode
    return one.opcode[0] in ("ld", "ldu", "st", "atom", "red") and not _SPACES & {*one.opcode}


# -- numbers ---------------------------------------------------------------------------------------


LANES = 32
PARAM_WINDOW = 1 << 60
SHARED_BASE = 1024
"""Where a block's shared memory begins: the system keeps the first KiB."""
LOCAL_BASE = 16

_WIDTHS = {"pred": 1, "b64": 8, "u64": 8}
_WIDTHS |= dict.fromkeys(("b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16"), 2)
_WIDTHS |= {"s64": 8, "f64": 8, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
_SPECIALS = {
    "%tid.x": "TID_X", "%ntid.x": "NTID_X", "%ctaid.x": "CTAID_X", "%ctaid.y": "CTAID_Y",
    "%ctaid.z": "CTAID_Z", "%nctaid.x": "NCTAID_X", "%nctaid.y": "NCTAID_Y",
    "%nctaid.z": "NCTAID_Z", "%laneid": "LANEID", "%warpid": "WARPID",
    "%lanemask_lt": "LANEMASK_LT",
    "%tid.y": "ZERO", "%tid.z": "ZERO", "%ntid.y": "ONE", "%ntid.z": "ONE",
    "%cluster_ctaid.x": "ZERO", "%cluster_ctarank": "ZERO", "%cluster_nctarank": "ONE",
    "%clock": "ZERO", "%clock64": "ZERO", "%globaltimer": "ZERO",
}  # fmt: skip
FIELDS = 13
"""Numbers of an instruction, in the order of ``engine/program.h``."""


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel as the interpreter runs it.

    Attributes:
        instructions: ``FIELDS`` numbers each.
        operands: three numbers each: width, number, value.
        tables: targets of indexed branches.
        presets: pairs of a special register's code and its offset in the register file.
        constants: memory of arrays that the module declares, by name.
    """

    kernel: Kernel
    instructions: array[int]
    operands: array[int]
    tables: array[int]
    presets: array[int]
    constants: dict[str, ctypes.Array[ctypes.c_char]]
    registers: int
    file_bytes: int
    shared_bytes: int
    local_bytes: int


def decoded(kernel: Kernel) -> Program:
    """Return a kernel's program.

    Raises:
        UnknownPtx: for an instruction that the interpreter does not know.
    """
    decoder = _Decoder(kernel)
    for instruction in kernel.instructions:
        decoder.add(instruction)
    decoder.add(Instruction(("ret",), (), None, 0, 0))  # a label may stand at the end
    return decoder.program()


class _Decoder:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.meetings = find_meetings(kernel)
        self.instructions = array("q")
        self.operands = array("q")
        self.tables = array("q")
        self.presets = array("q")
        self.places: dict[str, tuple[int, int, int]] = {}  # width, number, byte offset
        self.file_bytes = 0
        self.constants: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self.symbols: dict[str, int] = {
            name: PARAM_WINDOW + offset for name, offset, _ in kernel.params
        }
        self.shared = SHARED_BASE
        self.local = LOCAL_BASE
        for one in kernel.arrays:
            self._array(one.name, one.space, one.align, one.size, one.contents)

    def _array(self, name: str, space: str, align: int, size: int, contents: bytes) -> None:
        if space == "shared":
            self.shared = -(-self.shared // align) * align
            self.symbols[name] = self.shared
            self.shared += size
        elif space == "local":
            self.local = -(-self.local // align) * align
            self.symbols[name] = self.local
            self.local += size
        else:
            memory = ctypes.create_string_buffer(contents + bytes(16), size + 16)
            self.constants[name] = memory
            self.symbols[name] = ctypes.addressof(memory)

    def program(self) -> Program:
        return Program(
            self.kernel,
            self.instructions,
            self.operands,
            self.tables,
            self.presets,
            self.constants,
            len(self.places),
            self.file_bytes,
            self.shared - SHARED_BASE,
            self.local - LOCAL_BASE,
        )

    def add(self, one: Instruction) -> None:
        """Append an instruction's row."""
        rule = RULES.get(one.opcode[0])
        row = None if rule is None else rule(one, self.kind)
        if row is None:
            text = f"{'.'.join(one.opcode)} with {len(one.operands)} operands"
            raise UnknownPtx(self.kernel.name, one.line, text)
        first = len(self.operands) // 3
        for operand in row.operands:
            self._operand(operand, one)
        target, count = self._target(row, one)
        meeting = self.meetings.get(len(self.instructions) // FIELDS, NOWHERE)
        guard = -1 if one.guard is None else self.place(one.guard, one)[2]
        self.instructions.extend(
            (
                CODES[f"OP_{row.operation}"], row.type, row.source, row.choice, row.flags, count,
                guard, int(one.guard is not None and one.guard.negated),
                first, len(self.operands) // 3 - first, target, meeting,
                pipe_of(row.operation),
            )
        )  # fmt: skip

    def kind(self, operand: Operand) -> str:
        """Return the declared type of a register, "" for anything else."""
        if isinstance(operand, Register):
            return self.kernel.registers.get(operand.name, "")
        return ""

    def _target(self, row: Row, one: Instruction) -> tuple[int, int]:
        """Return a row's branch target and count; of ``brx``, its table's start and length."""
        if row.operation != "brx":
            return (self._label(row.target, one) if row.target else 0), row.count
        start, labels = len(self.tables), self.kernel.tables[row.target]
        self.tables.extend(self._label(label, one) for label in labels)
        return start, len(labels)

    def _label(self, name: str, one: Instruction) -> int:
        if name not in self.kernel.labels:
            raise UnknownPtx(self.kernel.name, one.line, f"label {name}")
        return self.kernel.labels[name]

    def _operand(self, operand: Operand | int, one: Instruction) -> None:
        match operand:
            case int():
                self._push(0, -1, operand)
            case Register(name="_"):
                self._push(0, -1, 0)
            case Register(negated=negated):
                width, number, value = self.place(operand, one)
                self._push(-1 if negated else width, -1 if width == 1 else number, value)
            case Literal(bits):
                self._push(0, -1, bits)
            case Symbol(name):
                if name not in self.symbols:
                    raise UnknownPtx(self.kernel.name, one.line, f"name {name}")
                self._push(0, -1, self.symbols[name])
            case Address(base, offset, coordinates):
                self._operand(base, one)
                self._push(0, -1, offset)
                for coordinate in coordinates:
                    self._operand(coordinate, one)
            case Parts(parts):
                for part in parts:
                    self._operand(part, one)

    def _push(self, width: int, number: int, value: int) -> None:
        value &= (1 << 64) - 1
        self.operands.extend((width, number, value - (1 << 64) if value >> 63 else value))

    def place(self, register: Register, one: Instruction) -> tuple[int, int, int]:
        """Return width, number and offset of a register, which is allocated on first use."""
        found = self.places.get(register.name)
        if found is not None:
            return found
        special = _SPECIALS.get(register.name)
        kind = "b32" if special else self.kernel.registers.get(register.name)
        if kind not in _WIDTHS:
            raise UnknownPtx(self.kernel.name, one.line, f"register {register.name}")
        width = _WIDTHS[kind]
        made = width, len(self.places), self.file_bytes
        self.places[register.name] = made
        self.file_bytes += 4 if width == 1 else LANES * width
        if special:
            self.presets.extend((CODES[special], made[2]))
        return made
