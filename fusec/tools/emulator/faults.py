"""The faults that the emulator finds, and their messages.

A fault names the kernel, the line of its PTX, the line of the Triton source that fusec printed, and
the index notation in the comment above that: what the kernel should compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.errors import FusecError


class UnknownPtx(FusecError):
    """An instruction, or a form of one, that the emulator does not know.

    Args:
        line: of the PTX, from 1.
    """

    def __init__(self, kernel: str, line: int, text: str) -> None:
        super().__init__(
            f"the emulator does not know this PTX, kernel {kernel} line {line}: {text}"
        )
        self.kernel = kernel
        self.line = line


_MEANINGS = {
    "out of bounds": "{bytes} bytes at {address} of global memory are in no buffer that was passed",
    "misaligned": "address {address} is no multiple of {bytes}",
    "outside of shared memory": "{bytes} bytes at {address} are not in the block's shared memory",
    "uninitialised read": "shared memory at {address} was never written",
    "race with a read": "shared memory at {address} is written while another warp or copy may "
    "still read it: no barrier or wait orders the two",
    "race with a write": "shared memory at {address} is touched while another warp or copy may "
    "still write it: no barrier or wait orders the two",
    "no proxy fence": "shared memory at {address} was written by ordinary stores, and no "
    "fence.proxy.async makes them visible to wgmma and bulk copies",
    "deadlock": "no warp can go on; this one waits here for ever",
    "no such mbarrier": "there is no mbarrier at {address}",
    "mbarrier touched": "there is an mbarrier at {address}, which an ordinary access hits",
    "too many arrivals": "more arrivals than the mbarrier expects in this phase",
    "register in flight": "a register is touched that a wgmma under way uses, or that is loaded "
    "from tensor memory: no wait covers it",
    "not waited for": "the block ends before this has been waited for",
    "divergent warp": "not all lanes of the warp are here",
    "bad descriptor": "descriptor {address} has a base offset",
    "no such tensor map": "no tensor map of rank {bytes} is at {address}",
    "step limit": "no end after {bytes} instructions",
    "trap": "trap",
    "barrier count": "barrier {address} gets other than the {bytes} threads that it waits for",
    "no wgmma fence": "accumulators were written after the last wgmma.fence that wgmma adds to",
    "transaction count": "the mbarrier is left with {bytes} bytes that it expects",
    "unsupported": "the emulator does not know this",
    "outside of local memory": "{bytes} bytes at {address} are not in the thread's local memory",
    "mbarrier race": "the mbarrier at {address} is made or ended while others may use it: no "
    "barrier orders the two",
    "register count": "{bytes} registers a thread: setmaxnreg.inc takes more than there were, .dec "
    "gives some back; 24 to 256, in steps of 8",
    "race between blocks": "another block touches global memory at {address}, one of them writes "
    "it ({bytes} bytes), and nothing orders blocks",
    "outside of tensor memory": "{bytes} columns at {address} (lane and column) are not allocated, "
    "or another warp's lanes",
    "tensor memory race": "tensor memory at {address} (lane and column) is touched while a product "
    "or another warp may still use it: no commit that somebody awaits, and no wait, orders the two",
    "uninitialised tensor memory": "tensor memory at {address} (lane and column) was never written",
    "tensor memory allocation": "{bytes} columns: no power of two from 32 to 512, no allocation of "
    "that size, or none is allowed any more",
    "tensor memory leak": "{bytes} columns at {address} are never given back",
    "access before the wait": "{bytes} bytes at {address} of global memory are touched before "
    "griddepcontrol.wait: the launch before this one may still run",
    "dependents before the wait": "griddepcontrol.launch_dependents lets the next launch start "
    "while the one before this kernel may still run, which that launch's wait does not cover",
    "no wait": "the kernel is launched to start while the launch before it ends, and a block ends "
    "without griddepcontrol.wait: whoever waits for this kernel does not wait for that launch",
}
"""Each kind of fault and its message, in the order of the engine's codes (``engine/warp.h``)."""
KINDS = ("", *_MEANINGS)


@dataclass(frozen=True, slots=True)
class Place:
    """The origin of an instruction.

    Attributes:
        line, text: of the PTX.
        source_line, source: of the printed Triton source; 0 and "" if unknown.
    """

    line: int
    text: str
    source_line: int
    source: str

    def __str__(self) -> str:
        shown = f"PTX line {self.line}: {self.text}"
        if self.source_line:
            shown += f"\n    Triton line {self.source_line}: {self.source}"
        return shown


@dataclass(frozen=True, slots=True)
class Fault:
    """An illegal action of a kernel.

    Attributes:
        kind: one of ``KINDS``.
        other: the instruction that it conflicts with, if there is one.
        block: of the grid.
        lane: of the warp, None if no single lane did it.
        notation: what the kernel computes, in index notation; () if the source does not say.
    """

    kernel: str
    kind: str
    meaning: str
    place: Place
    other: Place | None
    block: tuple[int, int, int]
    warp: int
    lane: int | None
    notation: tuple[str, ...] = ()

    def __str__(self) -> str:
        lane = "" if self.lane is None else f", lane {self.lane}"
        lines = [
            f"kernel {self.kernel}: {self.kind}: {self.meaning}",
            f"  block {self.block}, warp {self.warp}{lane}",
            f"  {self.place}",
        ]
        if self.other is not None:
            lines.append(f"  against {self.other}")
        lines += [f"  {line}" for line in self.notation]
        return "\n".join(lines)


class EmulationError(FusecError):
    """A kernel did something illegal."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def meaning_of(kind: str, address: int, detail: int) -> str:
    """Return the message of a fault of some kind at an address."""
    return _MEANINGS[kind].format(address=f"{address:#x}" if address >= 0 else "?", bytes=detail)


def notation_of(source: str) -> tuple[str, ...]:
    """Return the comment above a printed kernel: the index notation that it computes."""
    lines = source.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("# kernel ")]
    if not starts:
        return ()
    found = []
    for line in lines[starts[0] :]:
        if not line.startswith("#"):
            break
        found.append(line.removeprefix("# "))
    return tuple(found)
