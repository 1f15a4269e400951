"""The rules of ``fusec check --static``, which apply to the code of kernels.

``RULES`` has all of them: each has a name, a sentence, a function that describes a violation, and
advice. ``_rule`` makes one of a function and its docstring. Faults fail the check, warnings do not.
The limits come from compile sweeps and published measurements (docs/performance.md).

Worked example: the rule "spills" sees "88 bytes are spilled at 255 registers a thread".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusec.tools.report.expectation import Expectation
from fusec.tools.report.widths import MASKED, SCALAR, SMALL, UNALIGNED, Access
from fusec.tools.static_checks import StaticReport

WIDE_SHARE = 0.95
WARP_BYTES = 512
"""Bytes that one instruction of a warp moves: 16 of each of 32 threads, 8 of 64 (AMD)."""
FEW_SPILLED = 16
"""Spilled bytes a thread that cost less than a smaller tile would: outside of a product's loop, and
where ptxas limits registers for a higher occupancy, or lacks a few."""
ISSUE_SHARE = 0.8
"""The share of the issue budget above which a kernel is bound by instructions, not by memory."""
SHORT_US = 1.0
"""The memory's time for a kernel below which the overhead of its launch dominates."""
BYTES_IN_FLIGHT = 32 * 1024
"""Loads that one multiprocessor needs in flight: bandwidth times latency (H200: 23 to 33 KB)."""
_WGMMA_ROWS = 64
_WGMMA_THREADS = 128
_SIXTEEN_BITS = ("f16", "bf16")


@dataclass(frozen=True, slots=True)
class CheckedKernel:
    """One kernel of one graph, and the facts of its code.

    Attributes:
        kind: "pointwise", "reduction" or "contraction".
        code: name of the kernel whose code it runs; its own, or that of an equal one before it.
        static: facts of the code; None where it does not build.
        problem: why it does not build, or "".
        accesses: to global memory; empty where they could not be matched with the source.
        programs: blocks of one launch.
        bytes: that the kernel reads and writes, each element once.
        floor_us: how long the memory needs for them.
        expected: how long it should take, by the model of ``expectation.py``; None if that does not
            cover it.
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
    expected: Expectation | None = None

    @property
    def instructions_per_byte(self) -> float | None:
        """Thread-instructions for each byte moved; None with loops of unknown trip counts."""
        if self.static is None or self.static.loops or self.static.dots or not self.bytes:
            return None
        return self.static.instructions * self.static.threads * self.programs / self.bytes

    @property
    def is_transpose(self) -> bool:
        """Whether accesses are contiguous along different axes: shared memory transposes tiles."""
        return len({a.demand.axis for a in self.accesses if a.demand.left_out != SCALAR}) > 1

    @property
    def is_mixed(self) -> bool:
        """Whether tiles have elements of several sizes: no single layout loads 16 bytes of each."""
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


# -- the rules -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for kernels.

    Attributes:
        name: as the report prints it.
        says: the rule as a sentence, exceptions included.
        seen: returns how a kernel violates it, or "".
        advice: what to do about it.
        fault: whether it fails the check; a warning does not.
    """

    name: str
    says: str
    seen: Callable[[CheckedKernel], str]
    advice: str
    fault: bool = True


RULES = [
    Rule(
        "build",
        "Every kernel builds.",
        lambda kernel: kernel.problem,
        "fusec dump --stage source shows the kernel; please report it.",
    )
]

_Seen = Callable[[CheckedKernel, StaticReport], str]


def _rule(advice: str, *, fault: bool = True) -> Callable[[_Seen], _Seen]:
    """Make a rule of a function on kernels that build; its docstring is the rule's sentence."""

    def register(seen: _Seen) -> _Seen:
        def of_built(kernel: CheckedKernel) -> str:
            return seen(kernel, kernel.static) if kernel.static is not None else ""

        name, says = seen.__name__.replace("_", "-"), " ".join((seen.__doc__ or "").split())
        RULES.append(Rule(name, says, of_built, advice, fault))
        return seen

    return register


@_rule("Give a program fewer elements a thread: more warps, or a smaller tile.")
def spills(kernel: CheckedKernel, static: StaticReport) -> str:
    """No registers are spilled but 16 bytes a thread."""
    if static.spill_bytes <= FEW_SPILLED:
        return ""
    return f"{static.spill_bytes} bytes are spilled at {static.registers} registers a thread"


@_rule("Look at the layout that Triton chose: fusec dump --stage ttgir.")
def narrow_access(kernel: CheckedKernel, static: StaticReport) -> str:
    """Of the bytes of tiles that could move 16 at a time, 95 % do; 8 at a time on AMD.

    Left out are scalars, steps over elements, tiles of less than 16 bytes a thread, and rows or
    masks that end between multiples of 16 bytes.
    """
    able = [access for access in kernel.accesses if not access.demand.left_out]
    total = sum(access.bytes for access in able)
    wide = WARP_BYTES // static.processor.warp
    share = 1 - sum(access.narrower(wide) for access in able) / total if total else 1.0
    if share >= WIDE_SHARE:
        return ""
    worst = max(able, key=lambda access: access.narrower(wide))
    return (
        f"{share:.0%} of the bytes move {wide} at a time; {worst.narrowest} bytes at a time in "
        f"line {worst.line}: {worst.text}"
    )


@_rule("Give a thread 16 bytes of the widest element, no more.")
def layout_conversion(kernel: CheckedKernel, static: StaticReport) -> str:
    """A pointwise kernel does not exchange whole tiles between threads.

    Unless it transposes, mixes elements of several sizes, or has rows that end between multiples of
    16 bytes. Vectors that are spread over a tile, such as a bias, are free to.
    """
    if kernel.kind != "pointwise" or not static.convert_layouts:
        return ""
    if kernel.is_transpose or kernel.is_mixed or kernel.is_ragged:
        return ""
    tile = max((access.demand.elements for access in kernel.accesses), default=1)
    whole = sum(elements >= tile for elements in static.converted)
    return f"{whole} convert_layout of a whole tile in the ttgir" if whole else ""


@_rule("Give the tile 64 rows or more a warp group, or exchange the operands.")
def no_wgmma(kernel: CheckedKernel, static: StaticReport) -> str:
    """On sm_90 a tl.dot of 16-bit tiles with at least 64 rows and 4 warps is a wgmma."""
    if not static.processor.group_registers or static.threads < _WGMMA_THREADS or static.wgmma:
        return ""
    wanted = sum(dot.dtype in _SIXTEEN_BITS and dot.m >= _WGMMA_ROWS for dot in static.dots)
    if not wanted:
        return ""
    return f"{wanted} tl.dot of 16-bit tiles became {static.mma} mma.sync and no wgmma"


@_rule("Give the tile 16 rows, columns and terms or more.")
def no_mfma(kernel: CheckedKernel, static: StaticReport) -> str:
    """On AMD a tl.dot of 16-bit tiles is an MFMA instruction."""
    wanted = sum(dot.dtype in _SIXTEEN_BITS for dot in static.dots)
    if not static.processor.whole_operands or not wanted or static.mma:
        return ""
    return f"{wanted} tl.dot of 16-bit tiles became no MFMA instruction"


@_rule("Use a smaller tile or more warps; keep arithmetic on the left operand out of the loop.")
def serialised_wgmma(kernel: CheckedKernel, static: StaticReport) -> str:
    """ptxas overlaps every wgmma: no remark C75xx."""
    return static.serialised[0] if static.serialised else ""


@_rule("Use two stages or more, and pointers and strides that are multiples of 16 bytes.")
def synchronous_loop(kernel: CheckedKernel, static: StaticReport) -> str:
    """A loop with products loads ahead: it has TMA or cp.async."""
    if not static.idle_dot_loops:
        return ""
    return f"{static.idle_dot_loops} of {static.dot_loops} loops with products"


@_rule("Use fewer stages or a smaller tile: it builds, and cannot be launched.")
def shared_memory(kernel: CheckedKernel, static: StaticReport) -> str:
    """A block's shared memory fits: 166912 bytes on sm_80, 232448 on sm_90, 65536 on gfx942."""
    if static.shared_bytes <= static.processor.shared_bytes:
        return ""
    return f"{static.shared_bytes} bytes; {static.target} has {static.processor.shared_bytes}"


@_rule("Use fewer warps or a smaller tile: it builds, and cannot be launched.")
def registers(kernel: CheckedKernel, static: StaticReport) -> str:
    """A block's registers fit: registers * threads <= 65536; 131072 on AMD."""
    if static.registers * static.threads <= static.processor.registers:
        return ""
    most = static.processor.registers
    return f"{static.registers} registers * {static.threads} threads > {most}"


@_rule("Make the loop's tile as long as the row allows.", fault=False)
def thin_loop(kernel: CheckedKernel, static: StaticReport) -> str:
    """A loop over memory takes at least 16 bytes for each thread at a time.

    Unless all the kernel's bytes take less than 1 us.
    """
    if static.dots or not static.loops:
        return ""
    total = sum(access.bytes for access in kernel.accesses)
    small = [access for access in kernel.accesses if access.demand.left_out == SMALL]
    if kernel.floor_us < SHORT_US or 2 * sum(access.bytes for access in small) <= total:
        return ""
    worst = max(small, key=lambda access: access.bytes)
    return f"{worst.demand.elements} elements at a time for {static.threads} threads"


@_rule("Give a thread fewer registers or more loads.", fault=False)
def occupancy(kernel: CheckedKernel, static: StaticReport) -> str:
    """A kernel without products fills half a multiprocessor, or has 32 KiB of loads under way."""
    if static.dots or static.occupancy >= 0.5:
        return ""
    loads = sum(a.bytes for a in static.accesses if a.kind != "store")
    flight = loads * static.threads * static.blocks
    if not loads or flight >= BYTES_IN_FLIGHT:
        return ""
    return f"{static.occupancy:.0%} of the threads, {flight / 1024:.0f} KiB of loads under way"


@_rule(
    "It waits for arithmetic, not for memory: use cheaper forms, or a tile that the rows fill.",
    fault=False,
)
def issue_bound(kernel: CheckedKernel, static: StaticReport) -> str:
    """A kernel without loops issues at most 80 % of what the processor can while its bytes move.

    That is 5.5 thread-instructions a byte on sm_90. Kernels whose bytes take less than 1 us are
    left out.
    """
    rate, allowed = kernel.instructions_per_byte, ISSUE_SHARE * static.processor.issue_budget
    if rate is None or rate <= allowed or kernel.floor_us < SHORT_US:
        return ""
    return f"{rate:.1f} instructions a byte, over {allowed:.1f}"


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
