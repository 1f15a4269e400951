"""What a compiled kernel will do on the device, read from its code: no device is needed.

The text of stages is what compilers print, so that these are regular expressions over a foreign
format; all of them are here.

Worked example: ``inspect_kernel(compile_kernel(...)).load_widths == {16: 8}`` says that a thread
loads eight times, 16 bytes at once.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fusec.errors import BuildError, UsageError
from fusec.runtime.triton_kernel import CompiledAsm, tool_path

_ACCESS = r"\b{kind}\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)\b"
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Processor:
    """One streaming multiprocessor: what blocks on it share (registers: 65536 on all of these)."""

    threads: int
    shared_bytes: int
    blocks: int


PROCESSORS: Mapping[str, Processor] = {
    "sm_80": Processor(2048, 164 * 1024, 32),
    "sm_90": Processor(2048, 228 * 1024, 32),
    "sm_100": Processor(2048, 228 * 1024, 32),
    "sm_120": Processor(1536, 100 * 1024, 24),
}
_REGISTERS = 65536
_RESERVED_SHARED = 1024  # by the system, a block


@dataclass(frozen=True, slots=True)
class StaticReport:
    """Facts of one compiled kernel.

    Attributes:
        registers: of one thread.
        spill_bytes: written to and read from local memory because registers ran out.
        shared_bytes: of one block.
        load_widths, store_widths: bytes of one access of one thread to global memory -> how many.
        convert_layouts: tiles exchanged between threads, in the ttgir.
        barriers, instructions: in the machine code, without padding.
        blocks: that one multiprocessor holds at once.
        occupancy: their threads, as a share of all it can hold.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    load_widths: Mapping[int, int]
    store_widths: Mapping[int, int]
    convert_layouts: int
    barriers: int
    instructions: int
    blocks: int
    occupancy: float


def inspect_kernel(asm: CompiledAsm) -> StaticReport:
    """Return the report of a kernel compiled for an NVIDIA target.

    Raises:
        UsageError: for a target whose multiprocessor is not in ``PROCESSORS``.
    """
    processor = PROCESSORS.get(asm.target)
    if processor is None:
        raise UsageError.unknown("target", asm.target, PROCESSORS)
    ptx = asm.text("ptx")
    registers, spill_bytes = _resources(ptx)
    opcodes = Counter(_INSTRUCTION.findall(asm.text("sass")))
    shared_bytes = int(asm.metadata["shared"])
    threads = _threads(ptx)
    blocks = _resident_blocks(processor, threads, registers, shared_bytes)
    return StaticReport(
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=shared_bytes,
        load_widths=_widths(ptx, "ld"),
        store_widths=_widths(ptx, "st"),
        convert_layouts=asm.text("ttgir").count("ttg.convert_layout"),
        barriers=sum(n for op, n in opcodes.items() if op.startswith("BAR.")),
        instructions=sum(n for op, n in opcodes.items() if op != "NOP"),
        blocks=blocks,
        occupancy=blocks * threads / processor.threads,
    )


def _widths(ptx: str, kind: str) -> dict[int, int]:
    found = re.findall(_ACCESS.format(kind=kind), ptx)
    return dict(Counter(int(vector or 1) * int(bits) // 8 for vector, bits in found))


def _threads(ptx: str) -> int:
    match = re.search(r"\.reqntid (\d+)", ptx)
    return int(match[1]) if match else 32


def _resident_blocks(processor: Processor, threads: int, registers: int, shared_bytes: int) -> int:
    registers_of_a_warp = -(-registers * 32 // 256) * 256
    return min(
        _REGISTERS // (registers_of_a_warp * (threads // 32)),
        processor.threads // threads,
        processor.shared_bytes // (shared_bytes + _RESERVED_SHARED),
        processor.blocks,
    )


def _resources(ptx: str) -> tuple[int, int]:
    """Return registers and spilled bytes (stores and loads) as ptxas reports them."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    name = target[1] if target else ""
    blackwell = bool(re.match(r"sm_1\d\d", name))
    with tempfile.TemporaryDirectory(prefix="fusec-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ptxas = tool_path("ptxas_blackwell" if blackwell else "ptxas")
        command = [ptxas, "-v", "--regAllocOptLevel=2", f"--gpu-name={name}", str(source)]
        done = subprocess.run(
            [*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise BuildError(command, done.stderr, done.returncode)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)]
    return max(registers, default=0), sum(spills)
