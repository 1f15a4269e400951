"""Predict from its code what a compiled kernel does on the device; no device is needed.

The stages are text that compilers print, so they are parsed by regular expressions over a foreign
format; all of these are here. ``tools/report/static_rules.py`` decides which facts are faults.

Worked example: ``inspect_kernel(assembly_of(...)).widths("load") == {16: 8}`` means that a thread
loads eight times, 16 bytes at once.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusec.codegen.targets import TARGETS
from fusec.errors import BuildError, UsageError
from fusec.ir.machine import Resources
from fusec.runtime.kernels.triton_interior import assembler
from fusec.tools.assembly import Assembly
from fusec.tools.static_amd import read_assembly

_ACCESS = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)\b")
_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b.*?\], *(0x[0-9a-f]+|\d+)")
_PLACE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_TENSOR_COPY = re.compile(r"\bcp\.(?:async|reduce\.async)\.bulk\.tensor\b")
_WGMMA = re.compile(r"\bwgmma\.mma_async\b")
_MMA = re.compile(r"\bmma\.sync\b")
_TCGEN05 = re.compile(r"\btcgen05\.mma\b")
_TILE = r"(?:tensor|!ttg\.memdesc)<(\d+)x(\d+)x(\w+)[^>]*>"
_DOT = re.compile(rf"\b(?:tt\.dot|ttng\.warp_group_dot)\b.*?: {_TILE} \* {_TILE}")
_CONVERSION = re.compile(r"\bttg\.convert_layout\b.*?: tensor<((?:\d+x)+)")
_SERIALISED = re.compile(r"^.*(?:\bC75\d\d\b|instructions are serialized).*$", re.MULTILINE)

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"`\((\.L_x_\d+)\)")
_TENSOR_OPCODES = ("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA", "DMMA", "UTCHMMA", "UTCQMMA")
_COPY_OPCODES = ("LDGSTS", "UTMALDG")
_ROLES = "setmaxnreg"
"""The PTX instruction by which a producer warp gives registers to the consumer warps."""
_POLL = 4
"""The most instructions of a loop that polls an mbarrier."""
_WIDTH = re.compile(r"\.[SU]?(8|16|32|64|128)(?=\.|$)")
_REGISTER = re.compile(r"\bR(\d+)(\.64)?\b")


PROCESSORS: Mapping[str, Resources] = {
    name: target.machine.sm for name, target in TARGETS.items() if target.machine.sm.issue_budget
}
"""Targets whose machine code is judged -> their multiprocessor."""
_RESERVED_SHARED = 1024  # bytes per block, by the system, on NVIDIA


@dataclass(frozen=True, slots=True)
class GlobalAccess:
    """The global memory accesses of one thread that come from one line of the kernel's source.

    Attributes:
        line: of the source, counted from 1; 0 where Triton was told to keep no lines.
        kind: "load", "store", or "copy" (cp.async, to shared memory).
        width: bytes of one access.
        count: how many; a loop's body counts once.
    """

    line: int
    kind: str
    width: int
    count: int

    @property
    def bytes(self) -> int:
        return self.width * self.count


@dataclass(frozen=True, slots=True)
class DotTile:
    """A matrix product in the source: ``[m, k] x [k, n]``; ``dtype`` as in MLIR ("bf16")."""

    m: int
    n: int
    k: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Section:
    """A loop of the machine code without its inner loops, or the code outside all loops.

    Attributes:
        inside: the index of the enclosing section; -1 for the code outside all loops.
        instructions: that a warp issues per iteration.
        specials: those among them of the special function unit (MUFU).
        barriers: of the block.
        loaded, stored: bytes of global memory per thread, without TMA, which moves tiles.
        copied: those of the loaded bytes that are copied asynchronously to shared memory.
        products: tensor core instructions.
        waits: how often a warp waits for values that it has loaded: loads that are issued together
            arrive together.
    """

    inside: int
    instructions: int
    specials: int = 0
    barriers: int = 0
    loaded: int = 0
    stored: int = 0
    copied: int = 0
    products: int = 0
    waits: int = 0


@dataclass(frozen=True, slots=True)
class StaticReport:
    """Facts of one compiled kernel.

    Attributes:
        threads: of one block.
        registers: of one thread.
        spill_bytes: written to and read from local memory because registers ran out; on AMD, bytes
            of scratch memory.
        shared_bytes: of one block.
        accesses: to global memory, by line of the source; TMA moves tiles and is not among them.
        converted: elements of each tile whose layout the ttgir converts: threads exchange them.
        barriers, instructions: in the machine code, without padding.
        blocks: that one multiprocessor holds at once.
        occupancy: their threads, as a share of the most that it can hold.
        dots: the matrix products of the source.
        wgmma, mma, tcgen05: tensor core instructions of each kind; ``mma`` are AMD's MFMA, too.
        tma: TMA copies of tiles, in either direction.
        loops: in the machine code.
        dot_loops: those with tensor core instructions; ``idle_dot_loops`` of them have no
            asynchronous copy, so that they wait for memory in each iteration, unless another warp
            copies for them.
        serialised: messages of ptxas about wgmma that it could not overlap (C75xx).
        sections: the code outside all loops, then each loop, outer before inner.
        dependent: the kernel may start while the launch before it ends.
        unordered: lines of its PTX that a wait for that launch does not precede, as it should, if
            these were looked for.
    """

    target: str
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    accesses: tuple[GlobalAccess, ...]
    converted: tuple[int, ...]
    barriers: int
    instructions: int
    blocks: int
    occupancy: float
    dots: tuple[DotTile, ...]
    mma: int
    loops: int
    dot_loops: int
    wgmma: int = 0
    tcgen05: int = 0
    tma: int = 0
    idle_dot_loops: int = 0
    serialised: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    dependent: bool = False
    unordered: tuple[str, ...] = ()

    @property
    def convert_layouts(self) -> int:
        """The number of tiles that threads exchange to change their layout."""
        return len(self.converted)

    @property
    def copies(self) -> int:
        """The number of cp.async instructions of a thread."""
        return sum(self.widths("copy").values())

    @property
    def widest(self) -> int:
        """Bytes of the widest access; 0 if there is none."""
        return max((access.width for access in self.accesses), default=0)

    @property
    def narrowest(self) -> int:
        """Bytes of the narrowest access; 0 if there is none."""
        return min((access.width for access in self.accesses), default=0)

    @property
    def wide_share(self) -> float:
        """The share of 16-byte accesses, by bytes and without TMA; 1 if there is no access."""
        total = sum(access.bytes for access in self.accesses)
        wide = sum(access.bytes for access in self.accesses if access.width >= WIDE)
        return wide / total if total else 1.0

    @property
    def processor(self) -> Resources:
        return PROCESSORS[self.target]

    def widths(self, kind: str) -> dict[int, int]:
        """Return the bytes of an access of a thread to global memory -> how many there are.

        Args:
            kind: "load", "store" or "copy".
        """
        found: Counter[int] = Counter()
        for access in self.accesses:
            if access.kind == kind:
                found[access.width] += access.count
        return dict(found)


WIDE = 16
"""Bytes of the widest load or store of one thread."""


def inspect_kernel(asm: Assembly) -> StaticReport:
    """Return the report of a compiled kernel.

    Raises:
        UsageError: for a target whose multiprocessor is not in ``PROCESSORS``.
        BuildError: if ptxas rejects the kernel.
    """
    processor = PROCESSORS.get(asm.target)
    if processor is None:
        raise UsageError.unknown("target", asm.target, PROCESSORS)
    if "amdgcn" in asm.stages:
        threads = int(asm.metadata["num_warps"]) * processor.warp
        facts = read_assembly(asm.text("amdgcn"))
    else:
        declared = re.search(r"\.reqntid (\d+)", asm.text("ptx"))
        threads, facts = int(declared[1]) if declared else 32, _read_code(asm)
    accesses: Counter[tuple[int, str, int]] = facts.pop("accesses")
    shared_bytes = int(asm.metadata["shared"])
    blocks = _resident_blocks(processor, threads, facts["registers"], shared_bytes)
    return StaticReport(
        target=asm.target,
        threads=threads,
        shared_bytes=shared_bytes,
        accesses=tuple(GlobalAccess(*key, count) for key, count in sorted(accesses.items())),
        converted=_conversions(asm.text("ttgir")),
        blocks=blocks,
        occupancy=blocks * threads / processor.threads,
        dots=_dots(asm.text("ttir" if "ttir" in asm.stages else "ttgir")),
        dependent=bool(asm.metadata.get("launch_pdl")),
        **facts,
    )


def _read_code(asm: Assembly) -> dict[str, Any]:
    """Return the facts of a kernel's PTX and SASS, as fields of ``StaticReport``."""
    ptx, said, code = asm.text("ptx"), _assembler_output(asm), _Code.parse(asm.text("sass"))
    registers, spill_bytes = _resources(said)
    dot_loops = [loop for loop in code.loops if code.has(loop, _TENSOR_OPCODES)]
    fed = _ROLES in ptx
    return {
        "registers": registers,
        "spill_bytes": spill_bytes,
        "accesses": _accesses(ptx),
        "barriers": sum(opcode.startswith("BAR.") for opcode in code.opcodes),
        "instructions": sum(opcode != "NOP" for opcode in code.opcodes),
        "wgmma": len(_WGMMA.findall(ptx)),
        "mma": len(_MMA.findall(ptx)),
        "tcgen05": len(_TCGEN05.findall(ptx)),
        "tma": len(_TENSOR_COPY.findall(ptx)),
        "loops": len(code.loops),
        "dot_loops": len(dot_loops),
        "idle_dot_loops": sum(not (fed or code.has(loop, _COPY_OPCODES)) for loop in dot_loops),
        "serialised": tuple(line.strip() for line in _SERIALISED.findall(said)),
        "sections": tuple(code.sections()),
    }


# -- PTX -----------------------------------------------------------------------------------------


def _accesses(ptx: str) -> Counter[tuple[int, str, int]]:
    """Return the accesses of a kernel to global memory, by line of its source, kind and width.

    Triton 3.9 numbers lines of inline assembly as if they were the source's: these are skipped.
    """
    kinds = {"ld": "load", "st": "store"}
    found: Counter[tuple[int, str, int]] = Counter()
    home, line, inline = "", 0, False
    for text in ptx.splitlines():
        if "inline asm" in text:
            inline = "begin" in text
        elif place := _PLACE.match(text):
            if inline:
                continue
            home = home or place[1]  # the kernel begins in its own file
            line = int(place[2]) if place[1] == home else 0
        elif copy := _COPY.search(text):
            found[line, "copy", int(copy[1], 0)] += 1
        elif access := _ACCESS.search(text):
            width = int(access[2] or 1) * int(access[3]) // 8
            found[line, kinds[access[1]], width] += 1
    return found


def _conversions(ttgir: str) -> tuple[int, ...]:
    shapes = _CONVERSION.findall(ttgir)
    return tuple(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes)


def _dots(ttir: str) -> tuple[DotTile, ...]:
    found = _DOT.findall(ttir)
    return tuple(DotTile(int(m), int(n), int(k), dtype) for m, k, dtype, _, n, _ in found)


def _assembler_output(asm: Assembly) -> str:
    """Return the output of ptxas for a kernel: registers, spills, warnings."""
    ptx = asm.text("ptx")
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    name = target[1] if target else ""
    with tempfile.TemporaryDirectory(prefix="fusec-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ptxas = assembler(asm.target)
        command = [ptxas, "-v", "--regAllocOptLevel=2", f"--gpu-name={name}", str(source)]
        done = subprocess.run(
            [*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise BuildError(command, done.stderr, done.returncode)
    return done.stderr


def _resources(said: str) -> tuple[int, int]:
    """Return registers and spilled bytes (stores and loads) as ptxas reports them."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said)]
    return max(registers, default=0), sum(spills)


def _resident_blocks(processor: Resources, threads: int, registers: int, shared_bytes: int) -> int:
    granule = 8 * processor.warp
    registers_of_a_warp = -(-registers * processor.warp // granule) * granule
    reserved = 0 if processor.warp == 64 else _RESERVED_SHARED
    return min(
        processor.registers // (max(1, registers_of_a_warp) * (threads // processor.warp)),
        processor.threads // threads,
        (processor.shared_bytes + reserved) // max(1, shared_bytes + reserved),
        processor.programs,
    )


# -- machine code --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Code:
    """Opcodes in order, and the loops among them, each as (first, past the last).

    The slow path of a wait lies behind the end of the code; its branch back is no loop.

    Attributes:
        operands: of each instruction, as text.
    """

    opcodes: tuple[str, ...]
    operands: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, sass: str) -> _Code:
        opcodes: list[str] = []
        operands: list[str] = []
        labels: dict[str, int] = {}
        loops: dict[int, int] = {}
        end = 0
        for text in sass.splitlines():
            if label := _LABEL.match(text):
                labels[label[1]] = len(opcodes)
            elif instruction := _INSTRUCTION.match(text):
                opcodes.append(instruction[1])
                operands.append(instruction[2])
                goal = _BRANCH.search(instruction[2])
                start = labels.get(goal[1]) if goal and instruction[1].startswith("BRA") else None
                if not end and instruction[1] == "EXIT" and "@" not in text:
                    end = len(opcodes)
                # A branch to itself, behind the code, is a trap and no loop.
                back = end and start is not None and start < end
                if start is not None and start < len(opcodes) - 1 and not back:
                    loops[start] = len(opcodes)  # several branches to one label are one loop
        return cls(tuple(opcodes), tuple(operands), tuple(loops.items()))

    def has(self, loop: tuple[int, int], families: tuple[str, ...]) -> bool:
        """Return True if a loop has an instruction of one of the opcode families."""
        return any(opcode.split(".")[0] in families for opcode in self.opcodes[slice(*loop)])

    def sections(self) -> Iterator[Section]:
        """Yield the code outside all loops, then the loops in order, except polling loops."""
        loops = [loop for loop in self.loops if not self._polls(loop)]
        spans = [(0, len(self.opcodes)), *sorted(loops, key=lambda s: (s[0], -s[1]))]
        around = [
            max((n for n in range(k) if spans[n][0] <= first and last <= spans[n][1]), default=-1)
            for k, (first, last) in enumerate(spans)
        ]
        for k, span in enumerate(spans):
            inner = [spans[n] for n, outer in enumerate(around) if outer == k]
            own = [n for n in range(*span) if not any(a <= n < b for a, b in inner)]
            opcodes = [self.opcodes[n] for n in own]
            operands = [self.operands[n] for n in own]
            waits = _waits(opcodes, operands)
            if k:  # of an iteration that is not the first
                waits = _waits(2 * opcodes, 2 * operands) - waits
            yield _section(around[k], opcodes, waits)

    def _polls(self, loop: tuple[int, int]) -> bool:
        """Return True for a loop that polls an mbarrier until its phase ends."""
        first, last = loop
        return last - first <= _POLL and self.has(loop, ("SYNCS",))


def _waits(opcodes: Sequence[str], operands: Sequence[str]) -> int:
    """Return how often code reads a register that it has loaded since it last waited.

    All loads that were issued before have arrived then: memory answers in about their order.
    """
    found, awaited = 0, set[int]()
    for opcode, text in zip(opcodes, operands, strict=True):
        loads = opcode.startswith("LDG.")
        target, _, rest = text.partition(",") if loads else ("", "", text)
        if not awaited.isdisjoint(_registers(rest)):
            found, awaited = found + 1, set()
        if loads:
            awaited.update(_registers(target, max(1, _width(opcode) // 4)))
    return found


def _registers(operands: str, count: int = 1) -> Iterator[int]:
    """Yield the registers that operands name: ``count`` from each on, two of an address."""
    for named in _REGISTER.finditer(operands):
        first = int(named[1])
        yield from range(first, first + (2 if named[2] else count))


def _section(inside: int, opcodes: Sequence[str], waits: int) -> Section:
    moved = Counter[str]()
    for opcode in opcodes:
        moved[opcode.split(".")[0]] += _width(opcode)
    return Section(
        inside,
        sum(opcode != "NOP" for opcode in opcodes),
        sum(opcode.startswith("MUFU") for opcode in opcodes),
        sum(opcode.startswith("BAR.") for opcode in opcodes),
        moved["LDG"] + moved["LDGSTS"],
        moved["STG"],
        moved["LDGSTS"],
        sum(opcode.split(".")[0] in _TENSOR_OPCODES for opcode in opcodes),
        waits,
    )


def _width(opcode: str) -> int:
    """Return the bytes that one thread moves by an access; 4 where the opcode does not say."""
    if not opcode.startswith(("LDG.", "STG.", "LDGSTS.")):
        return 0
    found = _WIDTH.findall(opcode)
    return int(found[-1]) // 8 if found else 4
