"""Estimate a kernel's time by a model of its machine code; no device is needed.

Counts in the machine code (``Section``), times the trip counts of loops, give the time that each
unit of a multiprocessor needs, the waits of a block, and how blocks share a multiprocessor. Units
that work in parallel combine by the norm of degree 4 of their times: the largest decides, and one
nearly as large costs 19 % more. The floor is the time in which memory moves its bytes, or
tensor cores do their products, whichever is longer; the share is the floor divided by the expected
time, and the cause is the largest part of the rest.

A memory-bound kernel has these parts: memory, which also answers what later sweeps read again where
the L2 cache does not keep it (``passes/fusion/sweeps.py``, by which fusion decides, too); the L2
cache; instructions, 4 a clock and multiprocessor; special functions (MUFU), 16 lanes a clock; and
the latency of its blocks, by Little's law: a block waits for memory as often as its code does
(``Section.waits``), at barriers, and instructions of one warp are issued one after the other. All
resident blocks wait at the same time. A single block that copies nothing ahead loads, computes and
stores in turn.

A product takes the clocks of its tiles: tensor cores, or the shared memory that feeds them; the
loop's other instructions; barriers; prologue and epilogue of the loop. Where products alternate
with a softmax, an iteration takes the instructions of all blocks, half of their products, and a
chain of dependent steps that other blocks fill.

Its constants and these terms were fitted to launches on an H100: docs/performance.md
has the errors, which ``python -m bench.gpu_model`` prints. It does not model clocks that sink under
load, or that loads may hit a cache: a lead, not a measurement.

Worked example: an attention of 128 queries and 64 keys, head dimension 128, 8 warps, one block a
multiprocessor: products 1024 clocks, half of which count, softmax 720, chain 1300: a share of 0.40.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import TypeAlias

from fusec.errors import InternalError
from fusec.ir.expr import Const, Expr, IndexValue, Load, Op
from fusec.ir.index import Atom, Axis, FloorDiv, Index, Mod, Runtime, Size, product
from fusec.ir.machine import Machine
from fusec.ir.program import For, Let, Program, Put, Statement, statements
from fusec.tools.static_checks import DotTile, Section, StaticReport

MODELLED = frozenset(("sm_90",))
"""Targets that the model knows. Clocks are those of their multiprocessors."""
CLOCKS_US = 1755.0
PRODUCT_CLOCKS_US = 1461.0
"""Clocks a microsecond; the latter while tensor cores alone are busy."""
CACHE_BYTES_US = 7.0e6
"""Bytes a microsecond of the L2 cache."""
START_US = 1.8
"""Until the first block runs, and after the last one."""
RELEASE_US = 0.5
"""The same of a kernel that starts while the launch before it ends: its wait ends a round trip of
memory (``LATENCY``) after that launch does. This is an assumption, and no device has timed it."""
START = 550
"""Clocks until a block's first load is issued."""
LATENCY = 880
"""Clocks from loads to values, in a busy memory."""
AHEAD = 3
"""Iterations whose copies are in flight at once."""
BARRIER = 200
"""Clocks from the last warp at a barrier to the first instruction after it."""
STEP = 1.05
"""Clocks between two instructions of one warp."""
FILL = 1500
"""Clocks until a product's first tiles have arrived."""
REFILL = 1300
"""Clocks until a freed slot of a ring holds its next tile."""
PRODUCT_BARRIER = 12
"""Clocks that tensor cores are idle at a barrier, while another product is in flight."""
CHAIN = 1300
"""Clocks of an iteration of nested products that no other warp of the block hides: the scores'
product, maxima of rows, exponentials, the second product."""
MULTIPLY_ADDS = 2048
"""Multiply-adds of 16-bit values, a multiprocessor and clock."""
SHARED_BYTES = 128
"""Bytes that shared memory moves, a multiprocessor and clock."""
WARP_GROUP_ROWS = 64
"""Rows of a tile that one group of four warps multiplies."""
IN_FLIGHT = 32 * 1024
"""Bytes of loads that a multiprocessor keeps in flight."""
FIRST_CACHE = 96 * 1024
"""Bytes that an L1 cache keeps, for all blocks of its multiprocessor, beside streamed data."""
SMALL = 1 << 20
"""Bytes of a tensor that is likely to be read by all blocks: a weight, a bias."""
SEVERAL = 1.2
"""The mean number of loads of a byte above which the L2 cache's rate counts."""
SERIAL = 3
"""Waits for memory in an iteration from which the reason of a time names them."""
_DEGREE = 4.0
MIDDLE: Mapping[Axis, float] = MappingProxyType({})
"""No position along any axis."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a launch.

    Attributes:
        programs: blocks.
        runs: how often one block runs each section of its code.
        bytes: that it moves from and to memory; ``again`` of them are read again, by later sweeps.
        small: bytes of the tensors it reads that may stay in an L1 cache.
        multiplied: multiply-adds of its matrix products, without those that are masked.
        added: bytes that its blocks add to memory, which the L2 cache does.
    """

    programs: int
    runs: tuple[float, ...]
    bytes: int
    again: int = 0
    small: int = 0
    multiplied: float = 0.0
    added: float = 0.0


@dataclass(frozen=True, slots=True)
class Expectation:
    """The modelled time of a kernel.

    Attributes:
        floor_us: how long memory or tensor cores need at best.
        cause: the largest part of the rest, as a sentence.
        overlaps: it starts while the launch before it ends.
    """

    us: float
    floor_us: float
    cause: str
    overlaps: bool = False

    @property
    def share(self) -> float:
        return self.floor_us / self.us

    def __str__(self) -> str:
        alone = f" ({self.us + START_US - RELEASE_US:.3g} us without overlap)" * self.overlaps
        return f"expected {self.us:.3g} us{alone}, {self.share:.2f} of the floor: {self.cause}"


def section_runs(
    program: Program, static: StaticReport, moved: float, multiplied: float
) -> tuple[float, ...] | None:
    """Return how often one block runs each section of its code, or None if nothing tells.

    The program's loops tell, where the machine code has as many, apart from loops of one iteration,
    or around one loop, which are none there. So they do without those that may have been unrolled:
    the longest ones stay. Else all loops have the trip count that does a block's products or, if
    threads load elements of their own, moves its bytes.

    Args:
        moved, multiplied: bytes and multiply-adds of one block.
    """
    sections, made = static.sections, loop_runs(program)
    loops = [n for _, n in made]
    for found in (loops, [n for n in loops if n != 1], [n for s, n in made if not s.is_around_one]):
        if len(found) == len(sections) - 1:
            return (1.0, *found)
    if static.dots:
        share = sum(dot.m * dot.n * dot.k for dot in static.dots) / max(1, static.dot_loops)
        return (1.0, *[max(1.0, multiplied / share)] * (len(sections) - 1))
    if known := list(_without_unrolled(made, [s.inside for s in sections[1:]])):
        return max(known, key=lambda runs: _total((s.instructions for s in sections), runs))
    if len(sections) == 1:
        return (1.0,)
    around, *each = ((s.loaded + s.stored) * static.threads for s in sections)
    times = (moved - around) / max(1, sum(each))
    same = any(_loads_one_element(s, program.lanes) for loop, _ in made for s in loop.body)
    return None if same or times < 1 else (1.0, *[times] * len(each))


def _without_unrolled(
    made: Sequence[tuple[For, float]], inside: Sequence[int]
) -> Iterator[tuple[float, ...]]:
    """Yield how often sections run, for each choice of loops that may have been unrolled.

    Args:
        inside: the enclosing section of each but the first.
    """
    loops = [loop for loop, _ in made]
    own = {id(loop): place for place, loop in enumerate(loops)}
    around = {own[id(s)]: n for n, loop in enumerate(loops) for s in loop.body if id(s) in own}
    known = [n for n, s in enumerate(loops) if all(b.is_constant for b in (s.start, *s.stops))]
    for unrolled in combinations(known, max(0, len(made) - len(inside))):
        kept = [n for n in range(len(made)) if n not in unrolled]
        section = {-1: 0, **{n: k for k, n in enumerate(kept, 1)}}
        if [section.get(around.get(n, -1)) for n in kept] == list(inside):
            yield (1.0, *(made[n][1] for n in kept))


def _loads_one_element(statement: Statement, lanes: Collection[Axis]) -> bool:
    """Return True for a load of one element by all threads of a block."""
    load = statement.value if isinstance(statement, Let) else None
    return isinstance(load, Load) and load.axes.isdisjoint(lanes)


def loop_runs(program: Program, at: Mapping[Axis, float] = MIDDLE) -> list[tuple[For, float]]:
    """Return the loops, outer before inner, and how often they run for one point of the grid.

    Args:
        at: places along axes; those of others are their middle.
    """
    made: dict[Expr, Expr] = {
        s.var: s.value for s in statements(program.body) if isinstance(s, Let)
    }
    return list(_loop_runs(program.body, 1.0, made, at))


def _loop_runs(
    body: tuple[Statement, ...], times: float, made: Mapping[Expr, Expr], at: Mapping[Axis, float]
) -> Iterator[tuple[For, float]]:
    for statement in body:
        if isinstance(statement, For):
            stop = min(_value(stop, made, at) for stop in statement.stops)
            each = times * max(0.0, stop - _value(statement.start, made, at))
            yield statement, each
            yield from _loop_runs(statement.body, each, made, at)


def added_bytes(program: Program) -> float:
    """Return the bytes that one block adds to memory in its loops."""
    lanes, total = frozenset(program.lanes), 0.0
    for loop, times in loop_runs(program):
        for put in (s for s in loop.body if isinstance(s, Put) and s.adds):
            tile = product(a.extent for a in put.offset.axes & lanes).hint()
            total += times * tile * put.buffer.dtype.itemsize
    return total


def _value(value: Index, made: Mapping[Expr, Expr], at: Mapping[Axis, float]) -> float:
    """Evaluate an index with sizes at their hints, other axes at their middle, loads at 0."""

    def of(atom: Atom) -> float:
        match atom:
            case Axis():
                return at.get(atom, (atom.extent.hint() - 1) / 2)
            case Size():
                return atom.hint
            case FloorDiv():
                return _value(atom.dividend, made, at) / max(1.0, _value(atom.divisor, made, at))
            case Mod():
                return _value(atom.divisor, made, at) / 2
            case Runtime():
                return _computed(atom.expr, made, at)
            case _:
                raise InternalError(f"{atom} in an index", stage="report")

    return value.evaluate(of)


def _computed(value: Expr, made: Mapping[Expr, Expr], at: Mapping[Axis, float]) -> float:
    """Evaluate a value that indices determine, such as a loop's start by a mask; else 0."""
    match made.get(value, value):
        case IndexValue(index=found):
            return _value(found, made, at)
        case Const(value=number):
            return float(number)
        case Op(name="maximum", args=(a, b)):
            return max(_computed(a, made, at), _computed(b, made, at))
        case Op(name="minimum", args=(a, b)):
            return min(_computed(a, made, at), _computed(b, made, at))
        case _:
            return 0.0


def expect(static: StaticReport, work: Work, machine: Machine) -> Expectation:
    """Return how long a kernel should take on a machine of a modelled target."""
    memory_us, products_us = floors(work, machine)
    parts = _product_parts if products_us > memory_us and static.dots else _memory_parts
    return summed_up(parts(static, work, machine), (memory_us, products_us), static)


def floors(work: Work, machine: Machine) -> tuple[float, float]:
    """Return the times that memory and tensor cores need at best."""
    rate = MULTIPLY_ADDS * machine.units * PRODUCT_CLOCKS_US
    return work.bytes / machine.bytes_per_us, work.multiplied / rate


def summed_up(
    parts: Mapping[str, float], floor: tuple[float, float], static: StaticReport
) -> Expectation:
    """Combine the times of parts that work in parallel, each named by its cause."""
    start_us = RELEASE_US if static.dependent else START_US
    found = {**parts, "the launch itself: it is short": start_us}
    causes = {cause: part for cause, part in found.items() if cause}
    us = max(_norm(parts.values()), *floor) + start_us
    return Expectation(us, max(floor), max(causes, key=causes.__getitem__), static.dependent)


def _norm(parts: Iterable[float]) -> float:
    return float(sum(part**_DEGREE for part in parts) ** (1 / _DEGREE))


def _total(values: Iterable[float], runs: Sequence[float]) -> float:
    return sum(value * count for value, count in zip(values, runs, strict=True))


def _resident(static: StaticReport, work: Work, machine: Machine) -> int:
    """Return the number of blocks that share a multiprocessor."""
    return max(1, min(static.blocks, math.ceil(work.programs / machine.units)))


def _busy(work: Work, places: int) -> float:
    """Return the share of places for blocks that are filled, over all waves."""
    waves = work.programs / places
    return waves / math.ceil(waves)


# -- memory ----------------------------------------------------------------------------------------


def _memory_parts(static: StaticReport, work: Work, machine: Machine) -> dict[str, float]:
    """Return the times of a memory-bound kernel's parts by their causes; "": memory."""
    sections, runs = static.sections, work.runs
    warps, blocks = static.threads / 32, _resident(static, work, machine)
    waves = work.programs / machine.units / _busy(work, machine.units * blocks)
    scale = waves / CLOCKS_US
    asked = _total(_asked(sections), runs) * static.threads * work.programs
    instructions = _total((s.instructions for s in sections), runs)
    specials = _total((s.specials for s in sections), runs)
    per_byte = instructions * static.threads * work.programs / max(1, work.bytes)
    narrow = f"narrow accesses: {static.wide_share:.0%} of the bytes move 16 at a time"
    issued = narrow if static.wide_share < 0.5 else f"instructions: {per_byte:.1f} a byte"
    often = asked > SEVERAL * work.bytes and work.small > FIRST_CACHE
    memory_us, issued_us = work.bytes / machine.bytes_per_us, instructions * warps / 4 * scale
    if blocks == 1 and not static.tma and not any(s.copied for s in sections):
        issued, issued_us = _IN_TURN, memory_us + issued_us
        memory_us = 0.0
    return {
        _AGAIN if work.again else "": memory_us,
        "the second cache, for what is loaded several times": (
            asked / CACHE_BYTES_US if often else 0.0
        ),
        issued: issued_us,
        "functions by table": specials * static.threads / 16 * scale,
        _waits_for(static, work, blocks): _wait(static, runs) / blocks * scale,
    }


def _asked(sections: Sequence[Section]) -> Iterator[int]:
    """Yield the bytes that a thread loads and stores in each section.

    What is copied before a loop that copies, too, is what its last iterations do without.
    """
    around = {s.inside for s in sections if s.copied}
    for place, section in enumerate(sections):
        ahead = section.copied if place in around else 0
        yield section.loaded + section.stored - ahead


_AGAIN = "rows are read again, and do not stay in the cache"
_IN_TURN = "one block a multiprocessor: it loads, computes and stores in turn"


def _wait(static: StaticReport, runs: Sequence[float]) -> float:
    """Return the clocks from a block's start to its end, without contention."""
    return START + _total((_wait_of(s) for s in static.sections), runs)


def _wait_of(section: Section) -> float:
    loads = LATENCY * section.waits
    copies = LATENCY / AHEAD if section.copied and not section.waits else 0.0
    issued = STEP * section.instructions
    return loads + copies + BARRIER * section.barriers + issued


def _waits_for(static: StaticReport, work: Work, blocks: int) -> str:
    """Return the cause of the blocks' waits, as a sentence."""
    loops = [(s, n) for s, n in zip(static.sections, work.runs, strict=True) if s.inside >= 0]
    barriers = sum(BARRIER * s.barriers * n for s, n in loops)
    loads = sum(LATENCY * max(s.waits, s.copied > 0) * n for s, n in loops)
    widest = max((s.loaded for s in static.sections), default=0)
    flight = widest * static.threads * blocks
    if barriers and barriers > loads / 4:
        return f"barriers of the block in its loop: {max(s.barriers for s, _ in loops)} each time"
    serial = max((s.waits for s, _ in loops), default=0)
    if serial >= SERIAL:
        return f"loads of an iteration wait for one another: {serial} times"
    if static.wide_share < 0.5 and flight < IN_FLIGHT:
        return f"narrow accesses: {flight / 1024:.0f} KB under way on a multiprocessor"
    if flight < IN_FLIGHT:
        return f"few bytes in flight: {flight / 1024:.0f} KB on a multiprocessor"
    return f"blocks wait for their loads and barriers, {blocks} on a multiprocessor"


# -- products --------------------------------------------------------------------------------------


def _product_parts(static: StaticReport, work: Work, machine: Machine) -> dict[str, float]:
    """Return the times of a product's parts: "" for memory, and its tiles by the largest cause."""
    blocks = _resident(static, work, machine)
    loops = [(s, n) for s, n in zip(static.sections, work.runs, strict=True) if s.inside >= 0]
    loops = [(s, n) for s, n in loops if s.products]
    nested = any(s.specials for s, _ in loops) or bool(static.serialised)
    tile = (_nested_clocks if nested else _tile_clocks)(static, work, loops, blocks)
    # Blocks that share a multiprocessor share its units: half as many take half as long.
    busy = _busy(work, machine.units)
    scale = work.programs / machine.units / (CLOCKS_US if nested else PRODUCT_CLOCKS_US)
    whole = sum(tile.values()) * scale
    lost = {cause: clocks * scale for cause, clocks in tile.items() if cause}
    lost["the last wave of blocks fills a part of the multiprocessors"] = whole * (1 / busy - 1)
    cause = max(lost, key=lost.__getitem__)
    return {
        "": work.bytes / machine.bytes_per_us,
        cause: whole / busy,
        "the second cache, which adds to memory": work.added / CACHE_BYTES_US,
    }


def executed(static: StaticReport, runs: Sequence[float]) -> float:
    """Return the multiply-adds that one block does, masked ones included."""
    places = sum(s.products > 0 for s in static.sections)
    once = sum(dot.m * dot.n * dot.k for dot in static.dots) / max(1, places)
    return once * sum(n for s, n in zip(static.sections, runs, strict=True) if s.products)


Loops: TypeAlias = Sequence[tuple[Section, float]]
FED = "shared memory feeds tensor cores too slowly: a wider tile reads less"


def _tile_clocks(static: StaticReport, work: Work, loops: Loops, blocks: int) -> dict[str, float]:
    """Return a block's clocks by their causes; "": those that products take."""
    products = executed(static, work.runs) / MULTIPLY_ADDS
    fed = products * max(1.0, shared_bytes(static.dots, False) / SHARED_BYTES)
    around = static.sections[0].instructions * static.threads / 128 + FILL
    alone = "one block a multiprocessor: " if blocks == 1 else ""
    return {
        "": products,
        FED: fed - products,
        "barriers of the block in its loop": (
            sum(n * s.barriers for s, n in loops) * PRODUCT_BARRIER / blocks
        ),
        f"{alone}what stands before and behind its loop": around / blocks,
        "instructions of its loop": max(0.0, _beside(loops, static.threads) - fed),
    }


def _nested_clocks(static: StaticReport, work: Work, loops: Loops, blocks: int) -> dict[str, float]:
    """Return the same where an iteration's products and its other code wait for one another."""
    products = executed(static, work.runs) / MULTIPLY_ADDS
    fed = products * max(1.0, shared_bytes(static.dots, True) / SHARED_BYTES)
    straight = CHAIN * (static.sections[0].products > 0)  # one iteration, before a loop
    waits = straight + sum(n * (CHAIN + LATENCY * s.waits) for s, n in loops)
    beside = _beside(loops, static.threads)
    around = static.sections[0].instructions * static.threads / 128 + FILL / blocks
    alone = "one block a multiprocessor: " if blocks == 1 else ""
    softmax = any(s.specials for s, _ in loops)
    name = "softmax and products alternate" if softmax else "products wait for one another"
    return {
        "": products,
        FED: fed - products,
        f"{alone}{name}": alternating(fed, beside, waits / blocks) - fed,
        f"{alone}what stands before and behind its loop": around,
    }


def alternating(products: float, beside: float, waits: float) -> float:
    """Return the clocks of products that alternate with other code: half of them are hidden."""
    return max(products / 2 + beside + waits, products, beside)


def _beside(loops: Loops, threads: int) -> float:
    """Return the clocks of what loops compute beside their products."""
    return sum(n * max(s.instructions * threads / 128, s.specials * threads / 16) for s, n in loops)


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
