"""The rules of ``fusec check --static``, which apply to the code of kernels.

``RULES`` has all of them: each has a name, a function that describes a violation, and advice.
``_rule`` makes one of a function, whose docstring is the rule as a sentence. Faults fail the check,
warnings do not. The limits come from compile sweeps and published measurements
(docs/performance.md).

Worked example: the rule "spills" sees "88 bytes are spilled at 255 registers a thread".

Some rules compare how wide an access of the program could be with its width in the compiled kernel.
A thread loads at most 16 bytes at once. It can where the lanes walk memory in steps of one element,
the tile has 16 bytes for each thread, and neither a row's address nor a mask's end falls between
two multiples of 16 bytes. Where one of these fails, the access is left out, with the reason. The
printer writes the accesses of ``join_pairs(sink(program))`` in order, one ``tl.load`` or
``tl.store`` a line, or that of a tensor descriptor, and the compiled code has the line of each
access. A copy by descriptor is no access of any thread.

Worked example: ``x[m*1024 + c]`` of bf16 with 1024 lanes c in 4 warps can be 16 bytes wide. With
``m*1023`` the rows begin between multiples of 16 bytes, with 512 lanes a thread has 8 bytes.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusec.codegen.triton.load_widths import narrowed
from fusec.codegen.triton.pairs import join_pairs
from fusec.codegen.triton.sink import sink
from fusec.ir.expr import Buffer, Const, Expr, IndexValue, Load, Op, Var
from fusec.ir.index import Axis, Index, Size, product
from fusec.ir.program import Let, Program, Put, Update, statements
from fusec.tools.assembly import Assembly
from fusec.tools.report.kernel_time import Expectation
from fusec.tools.static_checks import WIDE, GlobalAccess, StaticReport

# -- how wide accesses could be --------------------------------------------------------------------


SCALAR = "one value for all threads of a row or program"
SCATTERED = "lanes do not walk memory in steps of one element"
SMALL = "the tile has less than 16 bytes for each thread"
UNALIGNED = "rows begin between multiples of 16 bytes"
MASKED = "the mask ends between multiples of 16 bytes"
BESIDE_WIDER = "in the layout of the tile beside it"
_PROMISED = 16  # divides addresses and, if it divides their hints, sizes


@dataclass(frozen=True, slots=True)
class Demand:
    """One load or store of a program.

    Attributes:
        buffer: its name.
        elements: of its tile; 1 where it has no lanes.
        axis: the lane axis along which memory is contiguous, if there is one.
        left_out: why a thread cannot access 16 bytes at once; "" where it can.
    """

    kind: str
    buffer: str
    itemsize: int
    elements: int
    axis: Axis | None
    left_out: str


@dataclass(frozen=True, slots=True)
class Access:
    """A demand, its line of the source, and the accesses of the compiled code there."""

    demand: Demand
    line: int
    text: str
    found: tuple[GlobalAccess, ...]

    @property
    def bytes(self) -> int:
        return sum(access.bytes for access in self.found)

    @property
    def narrow_bytes(self) -> int:
        return self.narrower(WIDE)

    def narrower(self, width: int) -> int:
        """Return the bytes that move fewer than ``width`` at a time."""
        return sum(access.bytes for access in self.found if access.width < width)

    @property
    def narrowest(self) -> int:
        return min((access.width for access in self.found), default=WIDE)


def demands(program: Program) -> tuple[Demand, ...]:
    """Return the loads and stores of a program, in the order in which they are printed."""
    program = join_pairs(sink(program))
    body = tuple(statements(program.body))
    values = {s.var: s.value for s in body if isinstance(s, Let)}
    lanes = frozenset(program.lanes)
    threads = program.warps * 32
    masks = {} if program.multiplies else narrowed(program)
    found = []
    for statement in body:
        match statement:
            case Let(value=Load() as load) | Update(value=Load() as load):
                tile = load.axes & lanes
                offset, guard, kind = load.indices[0], load.guard, "load"
                buffer = load.buffer
            case Put(buffer=buffer, offset=offset, value=value, guard=guard):
                varying = offset.axes | value.axes | (guard.axes if guard else frozenset())
                tile, kind = varying & lanes, "store"
            case _:
                continue
        demand = _demand(kind, buffer, offset, tile, threads, guard, values)
        if getattr(statement, "value", None) in masks:
            demand = replace(demand, left_out=demand.left_out or BESIDE_WIDER)
        found.append(demand)
    return tuple(found)


def match_accesses(
    program: Program, source: str, compiled: Sequence[GlobalAccess]
) -> tuple[Access, ...]:
    """Match each access of a program with those of the compiled kernel, by their lines.

    () if the compiled code has no line numbers, or the source has other accesses.
    """
    lines = _printed_accesses(source, program.name)
    wanted = demands(program)
    if [kind for kind, _ in lines] != [d.kind for d in wanted]:
        return ()
    if not any(access.line for access in compiled):
        return ()
    texts = source.splitlines()
    return tuple(
        Access(
            demand,
            line,
            texts[line - 1].strip(),
            tuple(access for access in compiled if access.line == line),
        )
        for demand, (_, line) in zip(wanted, lines, strict=True)
    )


def _printed_accesses(source: str, name: str) -> list[tuple[str, int]]:
    """Return (kind, line) of each load and store in a kernel's source, in order."""
    found = []
    for function in ast.parse(source).body:
        if not (isinstance(function, ast.FunctionDef) and function.name == name):
            continue
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name(), "load" | "store" as kind)):
                    found.append((kind, node.lineno))
                case ast.Call(func=ast.Attribute(ast.Name(), "atomic_add")):
                    found.append(("store", node.lineno))
    return sorted(found, key=lambda access: access[1])


def _demand(
    kind: str,
    buffer: Buffer,
    offset: Index,
    tile: frozenset[Axis],
    threads: int,
    guard: Expr | None,
    values: Mapping[Var, Expr],
) -> Demand:
    size = buffer.dtype.itemsize
    ordered = sorted(tile, key=lambda a: a.serial)
    axis = next((a for a in ordered if offset.steps_by_one(a)), None)
    elements = product(a.extent for a in tile).hint()
    vector = max(1, WIDE // size)
    if not tile:
        reason = SCALAR
    elif axis is None:
        reason = SCATTERED
    elif elements * size < WIDE * threads or axis.extent.hint() < vector:
        reason = SMALL
    elif _divisor(offset, axis) % vector:
        reason = UNALIGNED
    elif guard is not None and _mask_divisor(guard, axis, values) % vector:
        reason = MASKED
    else:
        reason = ""
    return Demand(kind, buffer.name, size, elements, axis, reason)


def _divisor(value: Index, axis: Axis) -> int:
    """Return a divisor of an index without its axis, up to the one that a launch guarantees."""
    found = math.gcd(_PROMISED, value.const)
    for monomial, coefficient in value.terms:
        if monomial == (axis,):
            continue
        sizes = [a for a in monomial if isinstance(a, Size) and a.hint % _PROMISED == 0]
        found = math.gcd(found, coefficient * _PROMISED ** len(sizes))
    return found


def _mask_divisor(guard: Expr, axis: Axis, values: Mapping[Var, Expr]) -> int:
    """Return a number such that a mask changes along an axis only at its multiples."""
    node = values.get(guard, guard) if isinstance(guard, Var) else guard
    if axis not in node.axes:
        return _PROMISED
    match node:
        case Op(name="and" | "or" | "not", args=args):
            return math.gcd(*(_mask_divisor(arg, axis, values) for arg in args))
        case Op(name="lt" | "ge", args=(left, right)):
            sides = _bound(left, axis, values), _bound(right, axis, values)
            return math.gcd(_PROMISED, *sides)
        case _:
            return 1


def _bound(side: Expr, axis: Axis, values: Mapping[Var, Expr]) -> int:
    """Return a divisor of one side of ``axis + a < b`` without the axis; 1 if unknown."""
    node = values.get(side, side) if isinstance(side, Var) else side
    match node:
        case Const(value=int(value)):
            return abs(value)
        case IndexValue(index=value) if axis not in value.axes or value.steps_by_one(axis):
            return _divisor(value, axis)
        case _:
            return 1


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
        expected: how long it should take, by the model of ``kernel_time.py``; None if that does not
            cover it, or cannot tell how often its loops run.
        assembly: its code, down to the processor's; None where it does not build.
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
    assembly: Assembly | None = field(default=None, compare=False, repr=False)

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
        seen: yields how a kernel violates it.
        advice: what to do about it.
        fault: whether it fails the check; a warning does not.
    """

    name: str
    seen: Callable[[CheckedKernel], Iterator[str]]
    advice: str
    fault: bool = True


RULES = [
    Rule(
        "build",
        lambda kernel: filter(None, [kernel.problem]),
        "fusec dump --stage source shows the kernel; please report it.",
    )
]

_Seen = Callable[[CheckedKernel, StaticReport], Iterator[str]]


def _rule(advice: str, *, fault: bool = True) -> Callable[[_Seen], _Seen]:
    """Make a rule of a function on kernels that build."""

    def register(seen: _Seen) -> _Seen:
        def of_built(kernel: CheckedKernel) -> Iterator[str]:
            if kernel.static is not None:
                yield from seen(kernel, kernel.static)

        RULES.append(Rule(seen.__name__.replace("_", "-"), of_built, advice, fault))
        return seen

    return register


@_rule("Give a program fewer elements a thread: more warps, or a smaller tile.")
def spills(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """No registers are spilled but 16 bytes a thread."""
    if static.spill_bytes > FEW_SPILLED:
        yield f"{static.spill_bytes} bytes are spilled at {static.registers} registers a thread"


@_rule("Look at the layout that Triton chose: fusec dump --stage ttgir.")
def narrow_access(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """Of the bytes of tiles that could move 16 at a time, 95 % do; 8 at a time on AMD.

    Left out are scalars, steps over elements, tiles of less than 16 bytes a thread, and rows or
    masks that end between multiples of 16 bytes.
    """
    able = [access for access in kernel.accesses if not access.demand.left_out]
    total = sum(access.bytes for access in able)
    wide = WARP_BYTES // static.processor.warp
    share = 1 - sum(access.narrower(wide) for access in able) / total if total else 1.0
    if share < WIDE_SHARE:
        worst = max(able, key=lambda access: access.narrower(wide))
        yield (
            f"{share:.0%} of the bytes move {wide} at a time; {worst.narrowest} bytes at a time in "
            f"line {worst.line}: {worst.text}"
        )


@_rule("Give a thread 16 bytes of the widest element, no more.")
def layout_conversion(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """A pointwise kernel does not exchange whole tiles between threads.

    Unless it transposes, mixes elements of several sizes, or has rows that end between multiples of
    16 bytes. Vectors that are spread over a tile, such as a bias, are free to.
    """
    tile = max((access.demand.elements for access in kernel.accesses), default=1)
    whole = sum(elements >= tile for elements in static.converted)
    excused = kernel.is_transpose or kernel.is_mixed or kernel.is_ragged
    if kernel.kind == "pointwise" and whole and not excused:
        yield f"{whole} convert_layout of a whole tile in the ttgir"


@_rule("Give the tile 64 rows or more a warp group, or exchange the operands.")
def no_wgmma(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """On sm_90 a tl.dot of 16-bit tiles with at least 64 rows and 4 warps is a wgmma."""
    able = static.processor.group_registers and static.threads >= _WGMMA_THREADS
    wanted = sum(dot.dtype in _SIXTEEN_BITS and dot.m >= _WGMMA_ROWS for dot in static.dots)
    if able and wanted and not static.wgmma:
        yield f"{wanted} tl.dot of 16-bit tiles became {static.mma} mma.sync and no wgmma"


@_rule("Give the tile 16 rows, columns and terms or more.")
def no_mfma(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """On AMD a tl.dot of 16-bit tiles is an MFMA instruction."""
    wanted = sum(dot.dtype in _SIXTEEN_BITS for dot in static.dots)
    if static.processor.whole_operands and wanted and not static.mma:
        yield f"{wanted} tl.dot of 16-bit tiles became no MFMA instruction"


@_rule("Use a smaller tile or more warps; keep arithmetic on the left operand out of the loop.")
def serialised_wgmma(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """ptxas overlaps every wgmma: no remark C75xx."""
    yield from static.serialised[:1]


@_rule(
    "Use two stages or more, and pointers and strides that are multiples of 16 bytes. What a "
    "product shares with another statement is never loaded ahead: Triton's copies would race."
)
def synchronous_loop(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """A loop with products loads ahead: it has TMA or cp.async."""
    if static.idle_dot_loops:
        yield f"{static.idle_dot_loops} of {static.dot_loops} loops with products"


@_rule("Use fewer stages or a smaller tile: it builds, and cannot be launched.")
def shared_memory(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """A block's shared memory fits: 166912 bytes on sm_80, 232448 on sm_90, 65536 on gfx942."""
    if static.shared_bytes > static.processor.shared_bytes:
        yield f"{static.shared_bytes} bytes; {static.target} has {static.processor.shared_bytes}"


@_rule("Use fewer warps or a smaller tile: it builds, and cannot be launched.")
def registers(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """A block's registers fit: registers * threads <= 65536; 131072 on AMD."""
    most = static.processor.registers
    if static.registers * static.threads > most:
        yield f"{static.registers} registers * {static.threads} threads > {most}"


@_rule("Wait first, once: fusec dump --stage ptx shows where griddepcontrol.wait is.")
def dependent_launch(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """A kernel that may start while the launch before it ends waits for it once, first of all."""
    if static.unordered:
        yield f"no wait, or another one, before: {static.unordered[0]}"


@_rule("Make the loop's tile as long as the row allows.", fault=False)
def thin_loop(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """A loop over memory takes at least 16 bytes for each thread at a time.

    Unless all the kernel's bytes take less than 1 us.
    """
    if static.dots or not static.loops or kernel.floor_us < SHORT_US:
        return
    total = sum(access.bytes for access in kernel.accesses)
    small = [access for access in kernel.accesses if access.demand.left_out == SMALL]
    if 2 * sum(access.bytes for access in small) > total:
        worst = max(small, key=lambda access: access.bytes)
        yield f"{worst.demand.elements} elements at a time for {static.threads} threads"


@_rule("Give a thread fewer registers or more loads.", fault=False)
def occupancy(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """A kernel without products fills half a multiprocessor, or has 32 KiB of loads under way."""
    if static.dots or static.occupancy >= 0.5:
        return
    loads = sum(a.bytes for a in static.accesses if a.kind != "store")
    flight = loads * static.threads * static.blocks
    if loads and flight < BYTES_IN_FLIGHT:
        yield f"{static.occupancy:.0%} of the threads, {flight / 1024:.0f} KiB of loads under way"


@_rule(
    "It waits for arithmetic, not for memory: use cheaper forms, or a tile that the rows fill.",
    fault=False,
)
def issue_bound(kernel: CheckedKernel, static: StaticReport) -> Iterator[str]:
    """A kernel without loops issues at most 80 % of what the processor can while its bytes move.

    That is 5.5 thread-instructions a byte on sm_90. Kernels whose bytes take less than 1 us are
    left out.
    """
    rate, allowed = kernel.instructions_per_byte, ISSUE_SHARE * static.processor.issue_budget
    if rate is not None and rate > allowed and kernel.floor_us >= SHORT_US:
        yield f"{rate:.1f} instructions a byte, over {allowed:.1f}"


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
        if rule.fault is fault
        for seen in rule.seen(kernel)
    )
