"""The rules of ``fusec check --static``: what no kernel should do, read from its code.

``RULES`` is the whole of it: each has a name, a sentence, a function that says what it saw, and
what to do about it. Faults fail the check, warnings do not. The limits come from compile sweeps and
published measurements (docs/performance.md).

Worked example: the rule "spills" sees "88 bytes are spilled at 255 registers a thread".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusec.report.widths import MASKED, SCALAR, SMALL, UNALIGNED, Access
from fusec.runtime.static_checks import REGISTERS, DotTile, StaticReport

WIDE_SHARE = 0.95
FEW_SPILLED = 16
"""Bytes a thread that cost less than a smaller tile would: outside of a product's loop, and where
ptxas takes fewer registers than it may so that more programs fit, or is short of a few."""
ISSUE_SHARE = 0.8
"""Of the issue budget, above which a kernel waits for instructions rather than for memory."""
SHORT_US = 1.0
"""Time of the memory below which a kernel is a launch and little else."""
BYTES_IN_FLIGHT = 32 * 1024
"""Loads that one multiprocessor needs under way: bandwidth times latency (H200: 23 to 33 KB)."""
_WGMMA_ROWS = 64
_WGMMA_THREADS = 128
_SIXTEEN_BITS = ("f16", "bf16")


@dataclass(frozen=True, slots=True)
class CheckedKernel:
    """One kernel of one graph, and what its code says.

    Attributes:
        kind: "pointwise", "reduction" or "contraction".
        code: name of the kernel whose code it runs; its own, or that of an equal one before it.
        static: facts of the code; None where it does not build.
        problem: why it does not build, or "".
        accesses: to global memory; empty where they could not be told apart.
        programs: blocks of one launch.
        bytes: that the kernel reads and writes, each element once.
        floor_us: how long the memory needs for them.
    """

    graph: str
    name: str
    kind: str
    code: str
    static: StaticReport | None
    problem: str
    accesses: tuple[Access, ...]
    programs: int
    bytes: int
    floor_us: float

    @property
    def instructions_per_byte(self) -> float | None:
        """Thread-instructions for each byte moved; None where loops hide how many run."""
        if self.static is None or self.static.loops or self.static.dots or not self.bytes:
            return None
        return self.static.instructions * self.static.threads * self.programs / self.bytes

    @property
    def is_transpose(self) -> bool:
        """Whether accesses are contiguous along different axes: tiles turn in shared memory."""
        return len({a.demand.axis for a in self.accesses if a.demand.left_out != SCALAR}) > 1

    @property
    def is_mixed(self) -> bool:
        """Whether tiles have elements of several sizes, which no one layout loads 16 bytes of."""
        sizes = {a.demand.itemsize for a in self.accesses if a.demand.left_out != SCALAR}
        return len(sizes) > 1

    @property
    def is_ragged(self) -> bool:
        """Whether rows or masks end between multiples of 16 bytes, which makes layouts differ."""
        return any(a.demand.left_out in (UNALIGNED, MASKED) for a in self.accesses)

    @property
    def left_out(self) -> tuple[Access, ...]:
        """The narrow accesses to which the rule of 16 bytes does not apply."""
        return tuple(a for a in self.accesses if a.demand.left_out and a.narrow_bytes)


# -- what the rules look at ----------------------------------------------------------------------


def _build(kernel: CheckedKernel) -> str:
    return kernel.problem


def _spills(kernel: CheckedKernel) -> str:
    static = kernel.static
    if static is None:
        return ""
    if static.spill_bytes <= FEW_SPILLED:
        return ""
    return f"{static.spill_bytes} bytes are spilled at {static.registers} registers a thread"


def _narrow(kernel: CheckedKernel) -> str:
    able = [access for access in kernel.accesses if not access.demand.left_out]
    total = sum(access.bytes for access in able)
    narrow = [access for access in able if access.narrow_bytes]
    share = 1 - sum(access.narrow_bytes for access in narrow) / total if total else 1.0
    if share >= WIDE_SHARE:
        return ""
    worst = max(narrow, key=lambda access: access.narrow_bytes)
    return (
        f"{share:.0%} of the bytes move 16 at a time; {worst.narrowest} bytes at a time in line "
        f"{worst.line}: {worst.text}"
    )


def _converts(kernel: CheckedKernel) -> str:
    if kernel.static is None or kernel.kind != "pointwise" or not kernel.static.convert_layouts:
        return ""
    if kernel.is_transpose or kernel.is_mixed or kernel.is_ragged:
        return ""
    tile = max((access.demand.elements for access in kernel.accesses), default=1)
    whole = sum(elements >= tile for elements in kernel.static.converted)
    return f"{whole} convert_layout of a whole tile in the ttgir" if whole else ""


def _wants_wgmma(dot: DotTile) -> bool:
    return dot.dtype in _SIXTEEN_BITS and dot.m >= _WGMMA_ROWS


def _no_wgmma(kernel: CheckedKernel) -> str:
    static = kernel.static
    if static is None or not static.processor.has_wgmma or static.threads < _WGMMA_THREADS:
        return ""
    wanted = sum(map(_wants_wgmma, static.dots))
    if not wanted or static.wgmma:
        return ""
    return f"{wanted} tl.dot of 16-bit tiles became {static.mma} mma.sync and no wgmma"


def _serialised(kernel: CheckedKernel) -> str:
    return kernel.static.serialised[0] if kernel.static and kernel.static.serialised else ""


def _idle_loop(kernel: CheckedKernel) -> str:
    if kernel.static is None or not kernel.static.idle_dot_loops:
        return ""
    return f"{kernel.static.idle_dot_loops} of {kernel.static.dot_loops} loops with products"


def _shared(kernel: CheckedKernel) -> str:
    static = kernel.static
    if static is None or static.shared_bytes <= static.processor.shared_limit:
        return ""
    return f"{static.shared_bytes} bytes; {static.target} has {static.processor.shared_limit}"


def _registers(kernel: CheckedKernel) -> str:
    static = kernel.static
    if static is None or static.registers * static.threads <= REGISTERS:
        return ""
    return f"{static.registers} registers * {static.threads} threads > {REGISTERS}"


def _thin(kernel: CheckedKernel) -> str:
    if kernel.static is None or kernel.static.dots or not kernel.static.loops:
        return ""
    total = sum(access.bytes for access in kernel.accesses)
    small = [access for access in kernel.accesses if access.demand.left_out == SMALL]
    if kernel.floor_us < SHORT_US or 2 * sum(access.bytes for access in small) <= total:
        return ""
    worst = max(small, key=lambda access: access.bytes)
    return f"{worst.demand.elements} elements at a time for {kernel.static.threads} threads"


def _occupancy(kernel: CheckedKernel) -> str:
    static = kernel.static
    if static is None or static.dots or static.occupancy >= 0.5:
        return ""
    loads = sum(a.bytes for a in static.accesses if a.kind != "store")
    flight = loads * static.threads * static.blocks
    if not loads or flight >= BYTES_IN_FLIGHT:
        return ""
    return f"{static.occupancy:.0%} of the threads, {flight / 1024:.0f} KiB of loads under way"


def _issue(kernel: CheckedKernel) -> str:
    rate = kernel.instructions_per_byte
    if kernel.static is None or rate is None:
        return ""
    allowed = ISSUE_SHARE * kernel.static.processor.issue_budget
    if rate <= allowed or kernel.floor_us < SHORT_US:
        return ""
    return f"{rate:.1f} instructions a byte, over {allowed:.1f}"


# -- the rules -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """What no kernel should do.

    Attributes:
        name: as the report prints it.
        says: the rule as a sentence, with its exceptions.
        seen: what a kernel does against it, or "".
        advice: what to do about it.
        fault: whether it fails the check; a warning does not.
    """

    name: str
    says: str
    seen: Callable[[CheckedKernel], str]
    advice: str
    fault: bool = True


RULES: tuple[Rule, ...] = (
    Rule(
        "build",
        "Every kernel builds.",
        _build,
        "fusec dump --stage source shows the kernel; please report it.",
    ),
    Rule(
        "spills",
        "No registers are spilled but 16 bytes a thread.",
        _spills,
        "Give a program fewer elements a thread: more warps, or a smaller tile.",
    ),
    Rule(
        "narrow-access",
        "Of the bytes of tiles that could move 16 at a time, 95 % do. Left out are scalars, steps "
        "over elements, tiles of less than 16 bytes a thread, and rows or masks that end between "
        "multiples of 16 bytes.",
        _narrow,
        "Look at the layout that Triton chose: fusec dump --stage ttgir.",
    ),
    Rule(
        "layout-conversion",
        "A pointwise kernel does not exchange whole tiles between threads, unless it transposes, "
        "mixes elements of several sizes, or has rows that end between multiples of 16 bytes. "
        "Vectors that are spread over a tile, such as a bias, are free to.",
        _converts,
        "Give a thread 16 bytes of the widest element, no more.",
    ),
    Rule(
        "no-wgmma",
        "On sm_90 a tl.dot of 16-bit tiles with at least 64 rows and 4 warps is a wgmma.",
        _no_wgmma,
        "Give the tile 64 rows or more a warp group, or exchange the operands.",
    ),
    Rule(
        "serialised-wgmma",
        "ptxas overlaps every wgmma: no remark C75xx.",
        _serialised,
        "Use a smaller tile or more warps; keep arithmetic on the left operand out of the loop.",
    ),
    Rule(
        "synchronous-loop",
        "A loop with products loads ahead: it has TMA or cp.async.",
        _idle_loop,
        "Use two stages or more, and pointers and strides that are multiples of 16 bytes.",
    ),
    Rule(
        "shared-memory",
        "A block's shared memory fits: 166912 bytes on sm_80, 232448 on sm_90.",
        _shared,
        "Use fewer stages or a smaller tile: it builds, and cannot be launched.",
    ),
    Rule(
        "registers",
        "A block's registers fit: registers * threads <= 65536.",
        _registers,
        "Use fewer warps or a smaller tile: it builds, and cannot be launched.",
    ),
    Rule(
        "thin-loop",
        "A loop over memory takes at least 16 bytes for each thread at a time, unless all the "
        "kernel's bytes take less than 1 us.",
        _thin,
        "Make the loop's tile as long as the row allows.",
        fault=False,
    ),
    Rule(
        "occupancy",
        "A kernel without products fills half of a multiprocessor, or has 32 KiB of loads under "
        "way on it.",
        _occupancy,
        "Give a thread fewer registers or more loads.",
        fault=False,
    ),
    Rule(
        "issue-bound",
        "A kernel without loops issues at most 80 % of what the processor can while the memory "
        "moves its bytes: 5.5 thread-instructions a byte on sm_90. Kernels whose bytes take less "
        "than 1 us are left out.",
        _issue,
        "It waits for arithmetic, not for memory: use cheaper forms, or a tile that the rows fill.",
        fault=False,
    ),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a kernel breaks, what was seen, and what to do."""

    graph: str
    kernel: str
    rule: str
    seen: str
    advice: str


def find_faults(kernels: tuple[CheckedKernel, ...], *, fault: bool = True) -> tuple[Finding, ...]:
    """Return the rules that kernels break: those that fail the check, or the warnings."""
    return tuple(
        Finding(kernel.graph, kernel.name, rule.name, seen, rule.advice)
        for kernel in kernels
        for rule in RULES
        if rule.fault is fault and (seen := rule.seen(kernel))
    )
