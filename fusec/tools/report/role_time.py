"""Estimate the time of a warp-specialized kernel from its roles' times, which overlap.

Programs are persistent, and the producer warp loads the next tiles while consumer warps multiply:
the time is the norm of the roles' times and of memory's (``kernel_time.py``: the largest decides).
Consumers wait only for the first load, and the time of a tile is that of the products and then of
the epilogue. Where products multiply results of others
(``codegen/triton/nested_specialization.py``), an iteration takes what ``kernel_time.py`` says of
products that alternate with a softmax, of one block.

No iteration is shorter than the time until a freed slot is full again, over the other slots.

Constants are those of ``kernel_time.py``, which also has their errors.

Worked example: an attention of 128 queries and 128 keys, head dimension 128, 8 warps: an iteration
has 2048 clocks of products, half of which count, 1010 of the softmax, and a chain of 1300: 0.61.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusec.codegen.triton.warp_specialization import joint_products
from fusec.ir.expr import Dot
from fusec.ir.index import Axis, product
from fusec.ir.machine import Machine
from fusec.ir.program import For, Let, Program, Update, is_product
from fusec.tools.report.kernel_time import (
    CHAIN,
    CLOCKS_US,
    FED,
    FILL,
    LATENCY,
    MIDDLE,
    MULTIPLY_ADDS,
    PRODUCT_BARRIER,
    PRODUCT_CLOCKS_US,
    REFILL,
    SHARED_BYTES,
    START,
    STEP,
    Expectation,
    Work,
    alternating,
    floors,
    loop_runs,
    shared_bytes,
    summed_up,
)
from fusec.tools.static_checks import DotTile, Section, StaticReport

_ALONE = "one group multiplies: it does not while it is behind its loop"
_SOFTMAX = "softmax and products alternate, and a chain of steps waits for itself"
_LATE = "slots of its ring are full too late: more of them would hide that"


@dataclass(frozen=True, slots=True)
class _Roles:
    """The machine code of each role, except what it does once a launch.

    Attributes:
        walk, loops: of a consumer group: the code for each tile, and the loops in it.
        copy_walk, copy_loops: of the producer warp, likewise.
    """

    walk: Section
    loops: tuple[Section, ...]
    copy_walk: Section
    copy_loops: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class _Tile:
    """The clocks of one tile: those of products, and others by their cause."""

    products: float
    lost: dict[str, float]
    nested: bool


def multiplied_by_tiles(program: Program) -> float:
    """Return the multiply-adds of a launch, masked ones included."""
    points = product(a.extent for a in program.grid).hint()
    return points * sum(
        n * sum(dot.m * dot.n * dot.k for dot in _dots(loop)) for loop, n in _innermost(program)
    )


def expect_roles(
    program: Program, static: StaticReport, work: Work, machine: Machine
) -> Expectation | None:
    """Return how long a kernel should take, or None if its code does not have the form of roles."""
    roles, loops = _roles(static.sections), _innermost(program)
    if roles is None or not len(loops) == len(roles.loops) == len(roles.copy_loops):
        return None
    runs = [n for _, n in loops]
    points = product(a.extent for a in program.grid).hint()
    each = points / min(program.programs, points)
    tile = _tile(program, roles, loops)
    scale = each / (CLOCKS_US if tile.nested else PRODUCT_CLOCKS_US)
    whole = tile.products + sum(tile.lost.values())
    waves = max(math.ceil(each) / each, _uneven(program))
    lost = {**tile.lost, "some programs have more work than others": whole * (waves - 1)}
    copying = roles.copy_walk.instructions + sum(
        s.instructions * n for s, n in zip(roles.copy_loops, runs, strict=True)
    )
    start = (START + FILL) / PRODUCT_CLOCKS_US
    parts = {
        "": work.bytes / machine.bytes_per_us,
        "the warp that loads: it issues one instruction at a time": STEP * copying * scale,
        max(lost, key=lost.__getitem__): whole * waves * scale + start,
    }
    return summed_up(parts, floors(work, machine), static)


def _innermost(program: Program, at: Mapping[Axis, float] = MIDDLE) -> list[tuple[For, float]]:
    """Return the innermost loops, and how often they run for a point of the grid."""
    found = loop_runs(program, at)
    return [(loop, n) for loop, n in found if not any(isinstance(s, For) for s in loop.body)]


def _uneven(program: Program) -> float:
    """Return the iterations of the longest program, beside the mean of all.

    Programs take every n-th tile. Where tiles along the innermost axis of the grid differ, as below
    a diagonal, some programs get long ones only.
    """
    axis, points = program.grid[-1], product(a.extent for a in program.grid).hint()
    count, programs = axis.extent.hint(), min(program.programs, points)
    each = [sum(n for _, n in _innermost(program, {axis: t})) for t in range(count)]
    if not 0 < min(each) < max(each):
        return 1.0
    longest = max(sum(each[n % count] for n in range(p, points, programs)) for p in range(programs))
    return longest * programs / (sum(each) * points / count)


def _dots(loop: For) -> list[DotTile]:
    """Return the products of an iteration, first those that do not depend on another one.

    Two that run as one are one, with the columns of both.
    """
    first = [s.value for s in loop.body if isinstance(s, Let) and isinstance(s.value, Dot)]
    later = [s.value for s in loop.body if isinstance(s, Update) and isinstance(s.value, Dot)]
    pairs = [] if first else joint_products(s for s in loop.body if isinstance(s, Update))
    wide = {one[1] for one, _ in pairs}
    later = [dot for dot in later if all(dot is not other for _, (_, other) in pairs)]

    def tile(dot: Dot) -> DotTile:
        over = frozenset(dot.over)
        m, n, k = (
            product(a.extent for a in axes).hint()
            for axes in (dot.left.axes - over, dot.right.axes - over, over)
        )
        n *= 2 if dot in wide else 1
        return DotTile(m, n, k, dot.left.dtype.name)

    return [tile(dot) for dot in (*first, *later)]


def _tile(program: Program, roles: _Roles, loops: Sequence[tuple[For, float]]) -> _Tile:
    """Return the clocks of one tile, for the consumer groups."""
    products = fed = lasting = late = 0.0
    nested = False
    for section, (loop, n) in zip(roles.loops, loops, strict=True):
        dots = _dots(loop)
        once = sum(dot.m * dot.n * dot.k / MULTIPLY_ADDS for dot in dots)
        beside = max(section.instructions * program.warps / 4, section.specials * program.warps * 2)
        nested = len(dots) > sum(isinstance(s, Update) for s in loop.body if is_product(s))
        slow = once * max(1.0, shared_bytes(dots, nested) / SHARED_BYTES)
        if nested:
            each = alternating(slow, beside, CHAIN + LATENCY * section.waits)
        else:
            each = max(slow, beside) + PRODUCT_BARRIER * section.barriers
        late += n * max(0.0, REFILL / max(1, program.stages - 1) - each)
        products, fed, lasting = products + n * once, fed + n * slow, lasting + n * each
    lasting, behind = lasting + late, roles.walk.instructions * program.warps / 4
    between = _SOFTMAX if nested else "instructions and barriers of its loop"
    lost = {FED: fed - products, between: lasting - late - fed, _LATE: late, _ALONE: behind}
    return _Tile(products, lost, nested)


def _roles(sections: Sequence[Section]) -> _Roles | None:
    """Return the code of each role.

    Triton's other warps, the producer among them, wait in a loop for work; the code of the first
    ones is outside of that loop.
    """
    inside = [s.inside for s in sections]
    multiplying = [n for n, s in enumerate(sections) if s.products and n not in inside]
    if not multiplying:
        return None
    walk = _below(multiplying[-1], inside, 0)
    loops = [n for n in multiplying if walk in _around(n, inside)]
    busy = {n for one in multiplying for n in (one, *_around(one, inside))}
    copying = [
        n
        for n in range(len(sections))
        if n not in inside and busy.isdisjoint((n, inside[n])) and len(_around(n, inside)) > 2
    ]
    if not copying:
        return None
    waiting = _around(copying[0], inside)[-2]
    copy_walk = _below(copying[0], inside, waiting)
    return _Roles(
        sections[walk],
        tuple(sections[n] for n in loops),
        sections[copy_walk],
        tuple(sections[n] for n in copying),
    )


def _around(number: int, inside: Sequence[int]) -> list[int]:
    """Return the sections around one, innermost first; the last is the code outside all loops."""
    found = []
    while (number := inside[number]) >= 0:
        found.append(number)
    return found


def _below(number: int, inside: Sequence[int], top: int) -> int:
    """Return the section around one, or itself, whose enclosing section is ``top``."""
    while inside[number] != top:
        number = inside[number]
    return number
