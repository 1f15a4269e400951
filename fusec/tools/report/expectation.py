"""Estimate a kernel's time by a model of its machine code; no device is needed.

Counts in the machine code (``Section``), times the trip counts of loops, give the time that each
unit of a multiprocessor needs, the waits of a block, and how blocks share a multiprocessor. Units
that work in parallel combine by the norm of degree 4 of their times: the largest decides, and one
nearly as large costs 19 % more. The floor is the time in which memory moves each byte once, or
tensor cores do their products, whichever is longer; the share is the floor divided by the expected
time, and the cause is the largest part of the rest.

A memory-bound kernel has these parts: memory; the L2 cache; instructions, 4 a clock and
multiprocessor; special functions (MUFU), 16 lanes a clock; and the latency of its blocks, by
Little's law: each section with loads waits once for memory, each barrier waits, and instructions of
one warp are issued one after the other. All resident blocks wait at the same time.

A product takes the clocks of its tiles: tensor cores, or the shared memory that feeds them; the
loop's other instructions, which depend on the products (a softmax) or not; barriers; prologue and
epilogue of the loop. With one block a multiprocessor, tensor cores are idle meanwhile.

Its constants are of an H200 (docs/performance.md has their sources). It is calibrated with
published measurements of eight kernels of one design, on which its error is 6 % on the mean and
19 % at worst: a fit, not a test of its estimates for others. It does not model clocks that sink
under load, partition camping, or a bad order of loads by ptxas: a lead, not a measurement.

Worked example: an attention of 128 queries and 64 keys, head dimension 128, 8 warps, one block a
multiprocessor: products 1024 clocks, softmax 890, one after the other: a share of 0.53.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusec.codegen.targets import H200_MACHINE
from fusec.errors import InternalError
from fusec.ir.expr import Const, Expr, IndexValue, Op
from fusec.ir.index import Axis, FloorDiv, Index, Mod, Runtime, Size
from fusec.ir.program import For, Let, Program, Statement, statements
from fusec.tools.static_checks import DotTile, Section, StaticReport


@dataclass(frozen=True, slots=True)
class Device:
    """The rates and sizes of a GPU, as in its ``Machine`` and measured besides.

    Attributes:
        bytes_us: bytes a microsecond of a copy, reads and writes together.
        cache_bytes_us: bytes a microsecond from the L2 cache.
        clocks_us: of a multiprocessor; ``tensor_clocks_us`` under a load of tensor cores.
        kept_bytes: of the L2 cache, that stay until they are read again.
        start_us: until the first block runs, and after the last one.
    """

    units: int
    bytes_us: float
    cache_bytes_us: float = 7.0e6
    clocks_us: float = 1755.0
    tensor_clocks_us: float = 1461.0
    kept_bytes: float = 40e6
    start_us: float = 2.0


H200 = Device(H200_MACHINE.units, H200_MACHINE.bytes_per_us)
H100 = replace(H200, bytes_us=3.0e6)
DEVICES = {"sm_90": H200}
"""Targets that the model knows."""
LATENCY = 1400
"""Clocks from a load to its value, while memory is busy: 0.8 us."""
AHEAD = 3
"""Iterations whose copies are in flight at once."""
BARRIER = 60
"""Clocks from the last warp at a barrier to the first instruction after it, waiting included."""
STEP = 2.5
"""Clocks between two instructions of one warp, half of which depend on the one before."""
START = 500
"""Clocks until a block's first load is issued."""
FILL = 1500
"""Clocks until a product's first tiles have arrived."""
PRODUCT_BARRIER = 12
"""Clocks that tensor cores are idle at a barrier, while another product is in flight."""
MULTIPLY_ADDS = 2048
"""Multiply-adds of 16-bit values, a multiprocessor and clock."""
SHARED_BYTES = 128
"""Bytes that shared memory moves, a multiprocessor and clock."""
WARP_GROUP_ROWS = 64
IN_FLIGHT = 32 * 1024
FIRST_CACHE = 96 * 1024
"""Bytes that an L1 cache keeps, for all blocks of its multiprocessor, beside streamed data."""
SMALL = 1 << 20
"""Bytes of a tensor that is likely to be read by all blocks: a weight, a bias."""
SEVERAL = 1.2
"""The mean number of loads of a byte above which the L2 cache's rate counts."""
_DEGREE = 4.0


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a launch.

    Attributes:
        programs: blocks.
        runs: how often one block runs each section of its code.
        bytes: that it reads and writes, each once; ``read`` of them are read.
        small: bytes of the tensors it reads that may stay in an L1 cache.
        multiplied: multiply-adds of its matrix products, without those that are masked.
    """

    programs: int
    runs: tuple[float, ...]
    bytes: int
    read: int
    small: int = 0
    multiplied: float = 0.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """The modelled time of a kernel.

    Attributes:
        floor_us: how long memory or tensor cores need at best.
        cause: the largest part of the rest, as a sentence.
    """

    us: float
    floor_us: float
    cause: str

    @property
    def share(self) -> float:
        return self.floor_us / self.us

    def __str__(self) -> str:
        return f"expected {self.us:.3g} us, {self.share:.2f} of the floor: {self.cause}"


def section_runs(
    program: Program, static: StaticReport, moved: float, multiplied: float
) -> tuple[float, ...]:
    """Return how often one block runs each section of its code.

    The program's loops tell, where the machine code has as many; else all loops have the trip count
    that moves a block's bytes or does its products.

    Args:
        moved, multiplied: bytes and multiply-adds of one block.
    """
    sections, loops = static.sections, [n for _, n in loop_runs(program)]
    if len(loops) == len(sections) - 1:
        return (1.0, *loops)
    each = sum((s.loaded + s.stored) * static.threads for s in sections[1:])
    around = (sections[0].loaded + sections[0].stored) * static.threads
    times = max(0.0, moved - around) / each if each else 1.0
    if static.dots:
        share = sum(dot.m * dot.n * dot.k for dot in static.dots) / max(1, static.dot_loops)
        times = multiplied / share
    return (1.0, *[max(1.0, times)] * (len(sections) - 1))


def loop_runs(program: Program) -> list[tuple[For, float]]:
    """Return the loops, outer before inner, and how often one block runs each body."""
    body = statements(program.body)
    return list(_loop_runs(program.body, 1.0, {s.var: s.value for s in body if isinstance(s, Let)}))


def _loop_runs(
    body: tuple[Statement, ...], times: float, made: Mapping[Expr, Expr]
) -> Iterator[tuple[For, float]]:
    for statement in body:
        if isinstance(statement, For):
            stop = min(_at_middle(stop, made) for stop in statement.stops)
            each = times * max(0.0, stop - _at_middle(statement.start, made))
            yield statement, each
            yield from _loop_runs(statement.body, each, made)


def _at_middle(value: Index, made: Mapping[Expr, Expr]) -> float:
    """Evaluate an index with sizes at their hints, axes at their middle, loaded values at 0."""
    total = float(value.const)
    for monomial, coefficient in value.terms:
        part = float(coefficient)
        for atom in monomial:
            match atom:
                case Axis():
                    part *= (atom.extent.hint() - 1) / 2
                case Size():
                    part *= atom.hint
                case FloorDiv():
                    divisor = max(1.0, _at_middle(atom.divisor, made))
                    part *= _at_middle(atom.dividend, made) / divisor
                case Mod():
                    part *= _at_middle(atom.divisor, made) / 2
                case Runtime():
                    part *= _value_at_middle(atom.expr, made)
                case _:
                    raise InternalError(f"{atom} in an index", stage="report")
        total += part
    return total


def _value_at_middle(value: Expr, made: Mapping[Expr, Expr]) -> float:
    """Evaluate a value that indices determine, such as a loop's start by a mask; else 0."""
    match made.get(value, value):
        case IndexValue(index=found):
            return _at_middle(found, made)
        case Const(value=number):
            return float(number)
        case Op(name="maximum", args=(a, b)):
            return max(_value_at_middle(a, made), _value_at_middle(b, made))
        case Op(name="minimum", args=(a, b)):
            return min(_value_at_middle(a, made), _value_at_middle(b, made))
        case _:
            return 0.0


def expect(static: StaticReport, work: Work, device: Device) -> Expectation:
    """Return how long a kernel should take."""
    memory_us, products_us = floors(work, device)
    parts = _product_parts if products_us > memory_us and static.dots else _memory_parts
    return summed_up(parts(static, work, device), (memory_us, products_us), device)


def floors(work: Work, device: Device) -> tuple[float, float]:
    """Return the times that memory and tensor cores need at best."""
    products_us = work.multiplied / (MULTIPLY_ADDS * device.units * device.tensor_clocks_us)
    return work.bytes / device.bytes_us, products_us


def summed_up(
    parts: Mapping[str, float], floor: tuple[float, float], device: Device
) -> Expectation:
    """Combine the times of parts that work in parallel, each named by its cause."""
    us = norm(parts.values()) + device.start_us
    found = {**parts, "the launch itself: it is short": device.start_us}
    causes = {cause: part for cause, part in found.items() if cause}
    return Expectation(us, max(floor), max(causes, key=causes.__getitem__))


def norm(parts: Iterable[float], degree: float = _DEGREE) -> float:
    return float(sum(part**degree for part in parts) ** (1 / degree))


def _total(values: Iterable[float], runs: Sequence[float]) -> float:
    return sum(value * count for value, count in zip(values, runs, strict=True))


def _resident(static: StaticReport, work: Work, device: Device) -> int:
    """Return the number of blocks that share a multiprocessor."""
    return max(1, min(static.blocks, math.ceil(work.programs / device.units)))


def _busy(work: Work, places: int) -> float:
    """Return the share of places for blocks that are filled, over all waves."""
    waves = work.programs / places
    return waves / math.ceil(waves)


# -- memory ----------------------------------------------------------------------------------------


def _memory_parts(static: StaticReport, work: Work, device: Device) -> dict[str, float]:
    """Return the times of a memory-bound kernel's parts by their causes; "": memory."""
    sections, runs, warps = static.sections, work.runs, static.threads / 32
    blocks = _resident(static, work, device)
    scale = work.programs / device.units / _busy(work, device.units * blocks) / device.clocks_us
    asked = _total((s.loaded + s.stored for s in sections), runs) * static.threads * work.programs
    again = _read_again(static, work, device, blocks)
    instructions = _total((s.instructions for s in sections), runs)
    specials = _total((s.specials for s in sections), runs)
    per_byte = instructions * static.threads * work.programs / max(1, work.bytes)
    narrow = f"narrow accesses: {static.wide_share:.0%} of the bytes move 16 at a time"
    issued = narrow if static.wide_share < 0.5 else f"instructions: {per_byte:.1f} a byte"
    often = asked > SEVERAL * work.bytes and work.small > FIRST_CACHE
    several = asked / device.cache_bytes_us if often else 0.0
    return {
        "": work.bytes / device.bytes_us,
        "rows are read again, and do not stay in the cache": again / device.bytes_us,
        "the second cache, for what is loaded several times": several,
        issued: instructions * warps / 4 * scale,
        "functions by table": specials * static.threads / 16 * scale,
        _waits_for(static, work, blocks): _wait(static, runs) / blocks * scale,
    }


def _read_again(static: StaticReport, work: Work, device: Device, blocks: int) -> float:
    """Return the bytes that loops after the first one read again from memory."""
    loops = sum(s.loaded > 0 and s.inside == 0 for s in static.sections[1:])
    held = work.read / max(1, work.programs) * blocks * min(device.units, work.programs)
    return work.bytes + (loops - 1) * work.read if loops > 1 and held > device.kept_bytes else 0.0


def _wait(static: StaticReport, runs: Sequence[float]) -> float:
    """Return the clocks from a block's start to its end, without contention."""
    return START + _total(map(_wait_of, static.sections), runs)


def _wait_of(section: Section) -> float:
    loads = LATENCY if section.loaded > section.copied else 0.0
    copies = LATENCY / AHEAD if section.copied and not loads else 0.0
    return loads + copies + BARRIER * section.barriers + STEP * section.instructions


def _waits_for(static: StaticReport, work: Work, blocks: int) -> str:
    """Return the cause of the blocks' waits, as a sentence."""
    loops = [(s, n) for s, n in zip(static.sections, work.runs, strict=True) if s.inside >= 0]
    barriers = sum(BARRIER * s.barriers * n for s, n in loops)
    loads = sum(LATENCY * n for s, n in loops if s.loaded)
    widest = max((s.loaded for s in static.sections), default=0)
    flight = widest * static.threads * blocks
    if barriers and barriers > loads / 4:
        return f"barriers of the block in its loop: {max(s.barriers for s, _ in loops)} each time"
    if static.wide_share < 0.5 and flight < IN_FLIGHT:
        return f"narrow accesses: {flight / 1024:.0f} KB under way on a multiprocessor"
    if flight < IN_FLIGHT:
        return f"few bytes in flight: {flight / 1024:.0f} KB on a multiprocessor"
    return f"blocks wait for their loads and barriers, {blocks} on a multiprocessor"


# -- products --------------------------------------------------------------------------------------


def _product_parts(static: StaticReport, work: Work, device: Device) -> dict[str, float]:
    """Return the times of a product's parts: "" for memory, and its tiles by the largest cause."""
    blocks = _resident(static, work, device)
    busy = _busy(work, device.units * blocks)
    scale = work.programs / device.units / device.tensor_clocks_us
    tile = _tile_clocks(static, work, blocks)
    whole = sum(tile.values()) * scale
    lost = {cause: clocks * scale for cause, clocks in tile.items() if cause}
    lost["the last wave of blocks fills a part of the multiprocessors"] = whole * (1 / busy - 1)
    cause = max(lost, key=lost.__getitem__) if lost else ""
    return {"": work.bytes / device.bytes_us, cause: whole / busy}


def executed(static: StaticReport, runs: Sequence[float]) -> float:
    """Return the multiply-adds that one block does, masked ones included."""
    once = sum(dot.m * dot.n * dot.k for dot in static.dots) / max(1, static.dot_loops)
    return once * sum(n for s, n in zip(static.sections, runs, strict=True) if s.products)


def _tile_clocks(static: StaticReport, work: Work, blocks: int) -> dict[str, float]:
    """Return a block's clocks by their causes; "": those that products take."""
    warps = static.threads / 32
    loops = [(s, n) for s, n in zip(static.sections, work.runs, strict=True) if s.products]
    products = executed(static, work.runs) / MULTIPLY_ADDS
    beside = sum(n * max(s.instructions * warps / 4, s.specials * static.threads / 16)
                 for s, n in loops)  # fmt: skip
    barriers = sum(n * s.barriers for s, n in loops) * PRODUCT_BARRIER
    around = static.sections[0].instructions * warps / 4 + FILL
    softmax = any(s.specials for s, n in loops if s.inside >= 0)
    fed = products * max(1.0, shared_bytes(static.dots, softmax) / SHARED_BYTES)
    alone = "one block a multiprocessor: " if blocks == 1 else ""
    found = {
        "": products,
        "shared memory feeds tensor cores too slowly: a wider tile reads less": fed - products,
        "barriers of the block in its loop": barriers / blocks,
        f"{alone}what stands before and behind its loop": around / blocks,
    }
    if softmax or static.serialised:
        other = norm((products, beside), 2) - products  # another block fills some of the gaps
        waits = beside if blocks == 1 else other
        name = "softmax and products alternate" if softmax else "products wait for one another"
        found[f"{alone}{name}"] = waits
    elif beside > fed:
        found["instructions of its loop"] = beside - fed
    return found


def shared_bytes(dots: Sequence[DotTile], softmax: bool) -> float:
    """Return the bytes a clock that shared memory has to move to feed the tensor cores.

    A warp group's product reads its 64 rows and all columns; tiles are written there first, except
    queries, which all iterations share.
    """
    moved = clocks = 0.0
    for dot in dots:
        left, right = 2 * dot.m * dot.k, 2 * dot.k * dot.n
        moved += left + right * max(1, dot.m // WARP_GROUP_ROWS) + right + (0 if softmax else left)
        clocks += dot.m * dot.n * dot.k / MULTIPLY_ADDS
    return moved / clocks if clocks else 0.0
