"""How long a kernel should take, by a model: no device is needed, and none has run it.

From counts in the machine code (``Section``), times how often each loop runs: the time that each
part of a multiprocessor needs, what a block waits for, and how blocks share a multiprocessor. Parts
that work side by side add up as the norm of their times of degree 4: the largest decides, and one
nearly as large costs 19 % more. The *floor* is the time in which memory moves each byte once, or
tensor cores do their products, whichever is longer; the *share* is the floor beside the expected
time, and the *cause* is what the largest part of the rest is spent on.

A kernel of memory has these parts: memory; the second cache; instructions, 4 a clock for a
multiprocessor; functions by table (MUFU), 16 lanes a clock; and the wait of its blocks, Little's
law: each stretch with loads waits once for memory, each barrier waits, instructions of one warp
stand in line. As many blocks wait at once as are resident.

A product is one tile's clocks: tensor cores, or shared memory that feeds them; what the loop does
beside them, which waits for their values (a softmax) or not; barriers; what stands before and
behind the loop. With one block a multiprocessor nobody multiplies meanwhile.

Its constants are of an H200 (docs/performance.md says where each is from). Calibrated with
published measurements of eight kernels that are built alike, on which it is off by 6 % on the mean
and by 19 % at worst: a fit, no test of what it says of others. It knows no clocks that sink under
load, no partition camping, no ptxas that orders loads badly: a lead, not a measurement.

Worked example: an attention of 128 queries and 64 keys, head dimension 128, 8 warps, one block a
multiprocessor: products 1024 clocks, softmax 890, one after the other: a share of 0.53.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusec.errors import InternalError
from fusec.ir.expr import Const, Expr, IndexValue, Op
from fusec.ir.index import Axis, FloorDiv, Index, Mod, Runtime, Size
from fusec.ir.program import For, Let, Program, Statement, statements
from fusec.tools.static_checks import DotTile, Section, StaticReport


@dataclass(frozen=True, slots=True)
class Device:
    """What a GPU does at most.

    Attributes:
        bytes_us: that a copy moves, reads and writes together.
        cache_bytes_us: that the second cache delivers.
        clocks_us: of a multiprocessor; ``tensor_clocks_us`` under a load of tensor cores.
        kept_bytes: of the second cache, that are there when they are read again.
        start_us: until the first block runs, and after the last one.
    """

    units: int = 132
    bytes_us: float = 4.3e6
    cache_bytes_us: float = 7.0e6
    clocks_us: float = 1755.0
    tensor_clocks_us: float = 1461.0
    kept_bytes: float = 40e6
    start_us: float = 2.0


H200 = Device()
H100 = Device(bytes_us=3.0e6)
DEVICES = {"sm_90": H200}
"""Targets that the model knows."""
LATENCY = 1400
"""Clocks from a load to its value, while memory is busy: 0.8 us."""
AHEAD = 3
"""Iterations whose copies are under way at once."""
BARRIER = 60
"""Clocks from the last warp at a barrier to the first instruction behind it, waiting included."""
STEP = 2.5
"""Clocks between two instructions of one warp that depend on one another, half of which do."""
START = 500
"""Clocks until a block's first load is issued."""
FILL = 1500
"""Clocks until a product's first tiles are there."""
PRODUCT_BARRIER = 12
"""Clocks that tensor cores stand still at a barrier: another product is under way meanwhile."""
MULTIPLY_ADDS = 2048
"""Of 16-bit values, a multiprocessor and clock."""
SHARED_BYTES = 128
"""That shared memory moves, a multiprocessor and clock."""
WARP_GROUP_ROWS = 64
IN_FLIGHT = 32 * 1024
FIRST_CACHE = 96 * 1024
"""Bytes that a multiprocessor keeps, for all its blocks, beside what streams by."""
SMALL = 1 << 20
"""Bytes of a tensor that is likely to be read by all blocks: a weight, a bias."""
SEVERAL = 1.2
"""How often bytes are loaded, on the mean, from where the second cache counts."""
_DEGREE = 4.0


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch does.

    Attributes:
        programs: blocks.
        runs: how often one block runs each section of its code.
        bytes: that it reads and writes, each once; ``read`` of them are read.
        small: bytes of those tensors that it reads which may stay in a first cache.
        multiplied: multiply-adds of its products of matrices, without those that are masked.
    """

    programs: int
    runs: tuple[float, ...]
    bytes: int
    read: int
    small: int = 0
    multiplied: float = 0.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the model says of a kernel.

    Attributes:
        floor_us: how long memory or tensor cores need at best.
        cause: what most of the rest is spent on, as a sentence.
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

    By the program's loops, where the machine code has as many; else all loops run as often as
    moves a block's bytes or does its products.

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
    """Return the loops, outer ones before those in them, and how often one block runs each body."""
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
    """Return an index with sizes at their hints, each axis at its middle, what is read at 0."""
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
    """Return what is computed of indices, such as where a mask lets a loop begin; else 0."""
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
    """Return what parts that work side by side come to; they are named by their causes."""
    us = norm(parts.values()) + device.start_us
    found = {**parts, "the launch itself: it is short": device.start_us}
    causes = {cause: part for cause, part in found.items() if cause}
    return Expectation(us, max(floor), max(causes, key=causes.__getitem__))


def norm(parts: Iterable[float], degree: float = _DEGREE) -> float:
    return float(sum(part**degree for part in parts) ** (1 / degree))


def _total(values: Iterable[float], runs: Sequence[float]) -> float:
    return sum(value * count for value, count in zip(values, runs, strict=True))


def _resident(static: StaticReport, work: Work, device: Device) -> int:
    """Return the blocks that share a multiprocessor."""
    return max(1, min(static.blocks, math.ceil(work.programs / device.units)))


def _busy(work: Work, places: int) -> float:
    """Return the share of waves of blocks that is not empty."""
    waves = work.programs / places
    return waves / math.ceil(waves)


# -- memory ----------------------------------------------------------------------------------------


def _memory_parts(static: StaticReport, work: Work, device: Device) -> dict[str, float]:
    """Return the times of a kernel's parts by what they would be the cause of; "": memory."""
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
    """Return the clocks from a block's start to its end, if nobody is in its way."""
    return START + _total(map(_wait_of, static.sections), runs)


def _wait_of(section: Section) -> float:
    loads = LATENCY if section.loaded > section.copied else 0.0
    copies = LATENCY / AHEAD if section.copied and not loads else 0.0
    return loads + copies + BARRIER * section.barriers + STEP * section.instructions


def _waits_for(static: StaticReport, work: Work, blocks: int) -> str:
    """Return what blocks wait for, as a sentence."""
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
    """Return the times of a product's parts: those beside its tile, and its tiles in a row."""
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
    """Return a block's clocks: "" those that products take, and others by their cause."""
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
    """Return the bytes a clock that shared memory moves while tensor cores do an iteration.

    A warp group's product reads its 64 rows and all columns; tiles are written there first, but
    for queries, which all iterations share.
    """
    moved = clocks = 0.0
    for dot in dots:
        left, right = 2 * dot.m * dot.k, 2 * dot.k * dot.n
        moved += left + right * max(1, dot.m // WARP_GROUP_ROWS) + right + (0 if softmax else left)
        clocks += dot.m * dot.n * dot.k / MULTIPLY_ADDS
    return moved / clocks if clocks else 0.0
