"""Choose tiles, warps and stages of kernels with matrix products: the first that fits a GPU.

What must fit. Registers: each product that a loop accumulates holds its tile from the first
iteration to the last, in f32; nested products, whose results another one reads (the scores of an
attention), hold at least two tiles (scores and weights) within an iteration. Shared memory: the
tiles that an iteration loads, once for each stage, and those that all iterations share.

Rules (compiled offline for sm_80 and sm_90, Triton 3.7.1, 2026-11). A thread needs some 60
registers beside those tiles. 160 for tiles spill nothing on sm_90, 128 on sm_80, where operands of
tensor cores are registers, too. 128x128 in 8 warps is the widest tile that leaves room for any
epilogue; where that makes fewer programs than there are multiprocessors, tiles are smaller.

Worked example, an attention of 128 rows and 64 keys with head dimension 64 in 8 warps: scores and
weights 2*128*64, sums 128*64, together 96 registers of 256 threads, and 128 in all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from fusec.ir.contraction import Factors
from fusec.ir.dtype import BF16, F4X2, F32, DType
from fusec.ir.expr import Expr, Load, Op, Reduce, children, postorder
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.groups import groups_of
from fusec.ir.index import Axis
from fusec.ir.machine import Machine, TileTuning
from fusec.passes.schedule.access import count
from fusec.passes.schedule.descriptors import is_copied
from fusec.passes.schedule.plan import Plan
from fusec.passes.schedule.pointwise import power_of_two

MIN_LANES = 16
"""Least rows and columns of a tensor core's tile."""
_LEAST_BYTES = 32
"""Bytes of the least terms of a tensor core's tile."""
_TENSOR_LANES = 128
"""Lanes of a column of tensor memory."""


@dataclass(frozen=True, slots=True)
class AxisUse:
    """Roles of the axes of a kernel with contractions.

    Attributes:
        tiled: axes with lanes on the grid, rows before columns.
        looped: the inside axis that runs in a loop of tiles.
        outer: loops around it, without lanes except for ``crossed``.
        whole: inside axes that are lanes without a loop.
        crossed: an inside axis with tiles along which some products sum, while others do along
            ``looped``: the outer loop on a CPU, on the grid of a GPU.
        panel: columns of a tile where weights are in panels; else 0.
    """

    tiled: tuple[Axis, ...]
    looped: Axis | None
    outer: tuple[Axis, ...]
    whole: tuple[Axis, ...]
    crossed: Axis | None = None
    panel: int = 0


@dataclass(frozen=True, slots=True)
class Tiling:
    """Axis -> lanes of its tiles, warps, and pipeline stages of the loop."""

    lanes: Mapping[Axis, int]
    warps: int
    stages: int

    @property
    def is_whole(self) -> bool:
        """Whether all tiles end where their axes do, whatever a call's sizes are."""
        extents = ((axis.extent, n) for axis, n in self.lanes.items())
        return all(extent.is_constant and extent.const % n == 0 for extent, n in extents)


@dataclass(frozen=True, slots=True)
class TileResources:
    """Tiles that take registers and shared memory, each as the set of its axes.

    Attributes:
        sums: products that a loop accumulates; products that share an accumulator count once.
        parts: the widest sum of one tile's products that f32 takes (``Plan.promotes``), if any.
        inner: nested products, which another product of the same iteration reads.
        added: products that an iteration adds to memory (``AxisUse.crossed``).
        products: all products, each of which tensor memory has room for.
        loads: operands, with the bytes of an element.
        drawn: random numbers, whose counters take registers as ``TileTuning.drawn`` tiles do.
        computed: operands that are computed from loads, which FMAs keep in registers.
        turned: operands that are computed, one of which at a time may go through shared memory to
            threads that multiply it.
        lefts, rights: operands that registers hold whole, with the bytes of an element: rows of one
            in each warp, all of the other.
        itemsize: bytes of an operand's element.
        terms: least terms of an iteration.
        warp: threads of a warp.
        wide: operands are multiplied by FMAs, not by tensor cores.
        tuning: the machine's.
        read_again: bytes of an element of tiles like those of ``inner`` that several values read,
            so that they stay.
    """

    sums: tuple[frozenset[Axis], ...]
    parts: tuple[frozenset[Axis], ...]
    inner: tuple[frozenset[Axis], ...]
    products: tuple[frozenset[Axis], ...]
    loads: tuple[tuple[frozenset[Axis], int], ...]
    drawn: tuple[frozenset[Axis], ...]
    computed: tuple[frozenset[Axis], ...]
    turned: tuple[frozenset[Axis], ...]
    lefts: tuple[tuple[frozenset[Axis], int], ...]
    rights: tuple[tuple[frozenset[Axis], int], ...]
    itemsize: int
    terms: int
    warp: int
    wide: bool
    tuning: TileTuning
    read_again: tuple[int, ...] = ()
    added: tuple[frozenset[Axis], ...] = ()

    @property
    def in_turn(self) -> bool:
        """Whether tiles of inner products take each other's registers.

        Each is read once, but for weights of which a further sum has a copy, and operands are as
        they were loaded.
        """
        further = len(self.sums) + len(self.added)
        return len(self.inner) > 1 and not self.computed and len(self.read_again) < further

    @property
    def stays(self) -> bool:
        """Whether scores stay beside the weights of several sums, as below a soft cap."""
        several = len(self.sums) + len(self.added)
        again = sum(self.read_again) >= F32.itemsize * several
        return len(self.inner) > 1 and several > 1 and again

    def registers(self, tiling: Tiling) -> float:
        """Return the registers of a thread for tiles of f32."""
        held: float = sum(area(axes, tiling.lanes) for axes in (*self.sums, *self.parts))
        between = [area(axes, tiling.lanes) for axes in self.inner]
        if between:
            passing = sum(area(axes, tiling.lanes) for axes in self.added)
            held += max(sum(between) * max(2, len(between)) // len(between), passing)
        drawn = max((area(axes, tiling.lanes) for axes in self.drawn), default=0)
        held += self.tuning.drawn * drawn
        if self.wide:
            held += sum(area(axes, tiling.lanes) for axes in self.computed)
        held *= self.tuning.by_fmas[bool(between)] if self.wide else 1
        held += sum(area(axes, tiling.lanes) * size / F32.itemsize for axes, size in self.lefts)
        whole = sum(area(axes, tiling.lanes) * size / F32.itemsize for axes, size in self.rights)
        return (held / tiling.warps + whole) / self.warp

    def shared_bytes(self, tiling: Tiling, looped: Axis | None, *, from_shared: bool) -> int:
        """Return the bytes of shared memory for operands, over all stages.

        Args:
            from_shared: whether tensor cores read them there, so that each stage has a tile.
        """
        total = 0
        for axes, itemsize in self.loads:
            tiles = tiling.stages - (not from_shared) if looped in axes else 1
            total += area(axes, tiling.lanes) * itemsize * tiles
        if from_shared:
            return total
        return total + self.itemsize * max((area(a, tiling.lanes) for a in self.turned), default=0)

    def tensor_columns(self, tiling: Tiling) -> int:
        """Return the columns of tensor memory for sums in f32 and for computed operands."""
        sums = sum(area(axes, tiling.lanes) for axes in self.products)
        operands = sum(area(axes, tiling.lanes) * self.itemsize for axes in self.turned)
        return (sums + operands // F32.itemsize) // _TENSOR_LANES


@dataclass(frozen=True, slots=True)
class ProductKernel:
    """A kernel with matrix products, by which plans choose tiles.

    Attributes:
        products: its contractions and their factors.
        use: the roles of its axes.
        work: the tiles that take registers and shared memory.
        grouped: axis of rows in groups -> rows of a group, on average.
    """

    kernel: Kernel
    machine: Machine
    products: Mapping[Reduce, Factors]
    use: AxisUse
    work: TileResources
    grouped: Mapping[Axis, int]

    @property
    def grid(self) -> tuple[Axis, ...]:
        """The axes on the grid of a GPU, also one along which programs add to memory."""
        return tuple(dict.fromkeys((*self.kernel.grid, *self.use.tiled)))

    @property
    def is_skinny(self) -> bool:
        """Whether it has so few rows that it is bound by memory."""
        return not self.use.tiled or self.rows <= self.work.tuning.skinny_rows

    @property
    def has_scales(self) -> bool:
        """Whether factors of all products have a scale for each block of terms."""
        return all(parts.scales for parts in self.products.values())

    @property
    def rows(self) -> int:
        """The rows that are multiplied with one matrix."""
        return min(self.grouped.get(a, a.extent.hint()) for a in self.use.tiled[:1])

    def most_lanes(self, axis: Axis) -> int:
        """Return the lanes of an axis in one tile, or fewer if each group has few of its rows.

        A tile runs once for each group that its rows belong to: one in two, if it has half as many
        rows as a group. Groups that fill a tile of an instruction with scales have one: of 140 rows
        it runs 1.9 times in place of 1.5, at twice the rate.
        """
        if axis not in self.grouped:
            return lanes_of(axis)
        rows, (scaled, _) = self.grouped[axis], self.machine.sm.scaled_tile
        half = 1 << max(rows // 2, 1).bit_length() - 1
        least = scaled if rows >= scaled and self.has_scales else MIN_LANES
        most = max(half, min(self.work.tuning.full_rows, 2 * half), least)
        return min(lanes_of(axis), most)

    def passes(self, tiling: Tiling) -> float:
        """Return how often a tile runs on average: once for each group of its rows."""
        return max((1 + tiling.lanes[a] / rows for a, rows in self.grouped.items()), default=1.0)

    def full(self, tiling: Tiling) -> float:
        """Return the programs for each multiprocessor that reach its full rates.

        Those of few rows wait for memory: with long steps fewer have as many bytes under way, of
        the columns, each of which one program reads. A cache has the rows.
        """
        tuning = self.work.tuning
        if not self.is_skinny:
            return 1.0
        if not self.reads_ahead:
            return tuning.full_skinny
        columns, looped = self.use.tiled[-1], self.use.looped
        step = sum(area(axes, tiling.lanes) * n for axes, n in self.work.loads if columns in axes)
        steps = min(tiling.stages - 1, tiles_along(looped, tiling) if looped else 1)
        share = max(tuning.full_long, tuning.skinny_bytes / max(1, step * steps))
        return min(tuning.full_skinny, share)

    def steps_by_side(self, tiling: Tiling) -> bool:
        """Return True for the widest steps of a kernel that adds to memory.

        Its operands' addresses spill 48 bytes there. With half the step (heads of 128 features)
        barriers and descriptors spill 300 (sm_90, Triton 3.7.1, 2026-11).
        """
        looped = self.use.looped if self.use.crossed else None
        return looped is not None and tiling.lanes[looped] >= self.work.tuning.side

    @property
    def is_nested(self) -> bool:
        """Whether tiles have rows and terms of an iteration, not rows and columns."""
        return bool(self.work.inner) or len(self.use.tiled) < 2

    def tiling(self, side: tuple[int, int], step: int, warps: int, stages: int) -> Tiling:
        """Return a tiling; a step of 0 means a swizzled row of the operands."""
        rows, columns = side
        lanes = {axis: lanes_of(axis) for axis in self.use.whole}
        for position, axis in enumerate(self.use.tiled):
            lanes[axis] = min(columns if position else rows, self.most_lanes(axis))
        if self.use.looped is not None:
            row = self.work.tuning.loop_bytes // self.work.itemsize
            by = min(step or row, row)
            lanes[self.use.looped] = min(by, max(self.work.terms, lanes_of(self.use.looped)))
        return Tiling(lanes, warps, stages)

    def with_step(self, tiling: Tiling, step: int) -> Tiling:
        """Return a tiling with a step that may be longer than a swizzled row."""
        if self.use.looped is None:
            return tiling
        by = min(step, max(self.work.terms, lanes_of(self.use.looped)))
        return replace(tiling, lanes={**tiling.lanes, self.use.looped: by})

    @property
    def takes_long_steps(self) -> bool:
        """Whether its rows of 16 bits are so few that barriers cost more than products."""
        if self.is_nested or self.grouped or self.work.itemsize != BF16.itemsize:
            return False
        return lanes_of(self.use.tiled[0]) <= self.work.tuning.long_rows

    @property
    def reads_ahead(self) -> bool:
        """Whether long steps load columns asynchronously, so that few programs are enough.

        Others wait in registers: columns of 4101 terms take 31 us for 23 of a split loop, and 4101
        columns side by side spill 6 KB (16 rows, model of sm_90, 2026-11).
        """
        if not self.takes_long_steps:
            return False
        operands = [side for parts in self.products.values() for side in (parts.left, parts.right)]
        loads = (n for n in postorder(operands) if isinstance(n, Load))
        return all(is_copied(n) for n in loads if self.use.tiled[-1] in n.axes)


def area(axes: frozenset[Axis], lanes: Mapping[Axis, int]) -> int:
    """Return the number of elements of a tile with these axes."""
    total = 1
    for axis in axes:
        total *= lanes.get(axis, 1)
    return total


def staged_stores(kernel: Kernel, lanes: Mapping[Axis, int]) -> dict[tuple[DType, int], int]:
    """Return the bytes of shared memory that descriptors store tiles from.

    One buffer serves stores of one type and number of columns: type, columns -> bytes.
    """
    found: dict[tuple[DType, int], int] = {}
    for store in kernel.stores:
        offset, axes = store.buffer.offset(store.indices), store.expr.axes
        columns = next((a for a in axes if offset.steps_by_one(a)), None)
        kind = store.buffer.dtype, 0 if columns is None else lanes.get(columns, 1)
        tile = area(axes, lanes) * store.buffer.dtype.itemsize
        found[kind] = max(tile, found.get(kind, 0))
    return found


def has_room(kernel: Kernel, plan: Plan, shared_bytes: int) -> bool:
    """Return False if a tile that a descriptor stores does not fit shared memory.

    Tiles are stored one after the other, behind the loop, whose memory they take.
    """
    lanes = {binding.axis: binding.tile for binding in plan.bindings}
    tiles = staged_stores(kernel, lanes).values()
    return not plan.descriptors or max(tiles, default=0) <= shared_bytes


def lanes_of(axis: Axis) -> int:
    """Return the lanes of an axis without a loop: a power of two, at least ``MIN_LANES``."""
    return max(MIN_LANES, power_of_two(axis.extent.hint()))


# -- what a kernel needs -------------------------------------------------------------------------


def find_work(
    kernel: Kernel,
    products: Mapping[Reduce, Factors],
    nested: set[Reduce],
    added: Collection[Reduce],
    machine: Machine,
) -> TileResources:
    """Return the tiles that a kernel's products need, some of which programs add to memory."""
    operands = [side for parts in products.values() for side in (parts.left, parts.right)]
    loads = {n: (n.axes, n.dtype.itemsize) for n in postorder(operands) if isinstance(n, Load)}
    computed = [n for n in dict.fromkeys(operands) if not isinstance(n, Load)]
    by_lanes = {n for n, p in products.items() if not (p.left_axes and p.right_axes)}
    multiplied = [p for n, p in products.items() if n not in by_lanes]
    outer = [node for node in products if node not in nested and node not in added]
    parts = [n.axes for n in outer if machine.sm.coarse and products[n].is_promoted]
    groups = [n for n in kernel_nodes(kernel) if isinstance(n, Reduce) and groups_of(n)]
    whole = products.values() if machine.sm.whole_operands and nested else ()
    return TileResources(
        tuple(_carried(n, by_lanes) for n in _sums(kernel, [*outer, *groups])),
        tuple(sorted(parts, key=lambda axes: -count(axes))[:1]),
        tuple(n.axes for n in products if n in nested),
        tuple(n.axes for n in products),
        tuple(loads.values()),
        tuple(n.axes for n in kernel_nodes(kernel) if isinstance(n, Op) and n.name == "random"),
        tuple(n.axes for n in computed if nested.isdisjoint(postorder((n,)))),
        tuple(n.axes for n in computed),
        tuple((p.left.axes, p.left.dtype.itemsize) for p in whole),
        tuple((p.right.axes, p.right.dtype.itemsize) for p in whole),
        max((p.left.dtype.itemsize for p in multiplied), default=BF16.itemsize),
        max((_least_terms(p) for p in multiplied), default=MIN_LANES),
        machine.sm.warp,
        not machine.sm.tf32 and any(p.left.dtype is F32 for p in multiplied),
        machine.tiles,
        tuple(_read_again(kernel, products, nested)),
        tuple(node.axes for node in added),
    )


def _read_again(
    kernel: Kernel, products: Mapping[Reduce, Factors], nested: set[Reduce]
) -> Iterator[int]:
    """Yield the bytes of each value, a tile like a nested product's, that has several readers."""
    batch = frozenset[Axis]().union(*(parts.shared for parts in products.values()))
    tiles, nodes = {n.axes - batch for n in products if n in nested}, kernel_nodes(kernel)
    readers = Counter(child for node in nodes for child in set(children(node)))
    for node in nodes:
        if readers[node] > 1 and node.axes - batch in tiles:
            yield node.dtype.itemsize


def _least_terms(parts: Factors) -> int:
    """Return the least terms of a tensor core's tile: of 4 bits, two are in a byte."""
    kinds = (parts.left.dtype, parts.right.dtype)
    return _LEAST_BYTES // kinds[0].itemsize * (2 if F4X2 in kinds else 1)


def _carried(node: Expr, by_lanes: set[Reduce]) -> frozenset[Axis]:
    """Return the axes of an accumulator: those of the terms where no ``Dot`` sums them."""
    return node.inner if isinstance(node, Reduce) and node in by_lanes else node.axes


def _sums(kernel: Kernel, products: list[Reduce]) -> Iterator[Expr]:
    """Yield the sums of products that are only added to each other, which share an accumulator."""
    roots = [store.expr for store in kernel.stores]
    nodes = postorder(roots)
    readers = Counter([*roots, *(child for node in nodes for child in set(children(node)))])
    alone: dict[Expr, Expr] = {node: node for node in products}
    for node in nodes:
        match node:
            case Op(name="add", args=(a, b)) if a is not b and a in alone and b in alone:
                if readers[a] == readers[b] == 1 and a.axes == b.axes:
                    alone[node] = alone.pop(a)
                    del alone[b]
    yield from alone.values()


# -- the choice ----------------------------------------------------------------------------------


def tilings(one: ProductKernel) -> tuple[Tiling, ...]:
    """Return the tilings that fit, the one chosen by rule first; the smallest if none does."""
    tuning = one.work.tuning
    preferred = list(_preferred(one))
    fitting = [t for tiling in preferred if (t := _staged(tiling, one)) is not None]
    if not fitting:
        return (preferred[-1],)
    others = [t for tiling in _others(one) if (t := _staged(tiling, one)) is not None]
    found = [fitting[0], *others, *fitting[1 : tuning.preferred]]
    distinct = {(tuple(t.lanes.items()), t.warps, t.stages): t for t in found}
    return tuple(distinct.values())[: tuning.offered]


def _staged(tiling: Tiling, one: ProductKernel) -> Tiling | None:
    """Return a tiling with as many of its stages as fit, or None if not even two do.

    The loop over groups takes registers of its own: 128 for tiles spill 20 to 52 bytes on sm_80. So
    do operands of 8 bits of two products in registers: 132 on sm_120, and scores that a gradient
    reads again, as below a soft cap: 160 spill 80 bytes on sm_90, and masks of the ends of axes in
    the widest steps of a kernel that adds to memory: 150 to 340 (Triton 3.7.1, 2026-11).
    """
    work, machine, axis = one.work, one.machine, one.use.looped
    held = work.itemsize == 1 and len(work.sums) > 1 and not machine.sm.from_shared
    ragged = one.steps_by_side(tiling) and not tiling.is_whole
    spare = work.tuning.spare if one.grouped or held or work.stays or ragged else 1
    if work.registers(tiling) > spare * machine.sm.tile_room(tiling.warps, work.in_turn):
        return None
    columns = machine.sm.tensor_columns
    if columns and work.tensor_columns(tiling) > columns:
        return None
    from_shared = machine.sm.from_shared and not one.takes_long_steps
    for stages in range(tiling.stages, 1, -1):
        less = Tiling(tiling.lanes, tiling.warps, stages)
        if work.shared_bytes(less, axis, from_shared=from_shared) <= machine.sm.shared_bytes:
            return less
    return None


def _preferred(one: ProductKernel) -> Iterator[Tiling]:
    """Yield tilings, the best first; later ones need less registers and make more programs."""
    use, units, tuning = one.use, one.machine.units, one.work.tuning
    if one.is_nested:
        shapes = tuning.nested if use.tiled else tuning.nested_vectors
        if use.tiled and lanes_of(use.tiled[0]) <= MIN_LANES:
            shapes = tuning.nested_skinny
        found = [one.tiling((s[0], s[0]), *s[1:]) for s in shapes]
        if one.work.in_turn and one.work.itemsize == BF16.itemsize:
            steps = ((s[1], one.tiling((s[0], s[0]), *s[1:])) for s in tuning.nested_gradients)
            found = [*(one.with_step(tiling, step) for step, tiling in steps), *found]
        yield from sorted(found, key=lambda t: not is_small(t, one))
        return
    if one.is_skinny:
        yield from _long(one)
        for columns in (tuning.side, 64, 32, 16):
            tiling = one.tiling((tuning.skinny_rows, columns), 0, 4, 6)
            if one.takes_long_steps:
                tiling = one.with_step(replace(tiling, stages=4), tuning.side)
            if columns <= 64 or programs(one, tiling) >= 2.0 * units:
                yield tiling
        return
    wide = [_fewest_warps(one.tiling(side, 0, 8, 3), one.work) for side in tuning.sides]
    wanted = tuning.busy * units
    enough = [t for t in wide if programs(one, t) >= wanted and _is_square(t, one)]
    yield from enough
    yield from (t for t in wide if _is_square(t, one) and t not in enough)
    yield from reversed(wide)


def _long(one: ProductKernel) -> Iterator[Tiling]:
    """Yield tilings of few rows with long steps whose programs keep the memory busy.

    The widest reads the rows least often. A narrower one has a longer step, so that an iteration
    loads as many weights, and needs no split loop and no second kernel. Rows that are computed
    would be so for each tile: a SiLU of 16 x 4096 to 6144 takes 40 us, 18 in a split loop (model
    of sm_90, 2026-11).
    """
    tuning = one.work.tuning
    rows = tuning.skinny_rows
    if not one.reads_ahead or any(one.use.tiled[-1] not in axes for axes in one.work.turned):
        return
    for columns, step, warps, stages in tuning.skinny_long:
        tiling = one.with_step(one.tiling((rows, columns), 0, warps, stages), step)
        enough = programs(one, tiling) >= one.full(tiling) * one.machine.units
        if enough and _staged(tiling, one) == tiling:
            yield tiling


def is_small(tiling: Tiling, one: ProductKernel) -> bool:
    """Return True for tiles of nested products in one group of warps, where these are preferred.

    Several of their programs fit a multiprocessor's shared memory, or wider tiles would be fewer
    than multiprocessors.
    """
    tuning, use, machine = one.work.tuning, one.use, one.machine
    if not (one.work.inner and use.tiled and use.looped and tuning.small_programs):
        return False
    if use.crossed:
        return False
    narrowest = min(tiling.lanes[use.tiled[0]], tiling.lanes[use.looped])
    each = one.work.shared_bytes(tiling, use.looped, from_shared=machine.sm.from_shared)
    wide = one.tiling((tuning.side, tuning.side), 0, 8, 2)
    few = programs(one, wide) < tuning.busy * machine.units
    fits = few or tuning.small_programs * each <= machine.sm.shared_bytes
    return fits and tiling.warps == 4 and narrowest == tuning.full_rows


def _is_square(tiling: Tiling, one: ProductKernel) -> bool:
    """Return True for tiles of at least 64 rows, or of all rows."""
    rows = one.use.tiled[0]
    return tiling.lanes[rows] >= min(64, one.most_lanes(rows))


def _fewest_warps(tiling: Tiling, work: TileResources) -> Tiling:
    half = Tiling(tiling.lanes, 4, tiling.stages)
    return half if work.registers(half) <= work.tuning.few_registers else tiling


def programs(one: ProductKernel, tiling: Tiling) -> int:
    """Return how many tiles a kernel has, at the hints of sizes."""
    return math.prod(tiles_along(axis, tiling) for axis in one.grid)


def filled(one: ProductKernel, tiling: Tiling, units: int) -> float:
    """Return the share of the multiprocessors' lanes that tiles fill, in whole waves of them all.

    It counts the last wave, in which some have no tile, and the lanes of tiles beyond the ends.
    """
    waves = -(-programs(one, tiling) // units)
    tile = math.prod(tiling.lanes.get(axis, 1) for axis in one.grid)
    return math.prod(a.extent.hint() for a in one.grid) / (waves * units * tile)


def tiles_along(axis: Axis, tiling: Tiling) -> int:
    """Return how many tiles a kernel has along one axis, at the hint of its size."""
    return -(-axis.extent.hint() // tiling.lanes.get(axis, 1))


def _others(one: ProductKernel) -> Iterator[Tiling]:
    """Yield further tilings that a race may try, likeliest first."""
    tuning = one.work.tuning
    if one.use.looped is None:
        return
    if one.is_nested:
        for rows, step, warps, stages in tuning.nested_others:
            yield one.tiling((rows, rows), step, warps, stages)
    elif one.is_skinny:
        for columns, warps, stages in tuning.skinny_others:
            yield one.tiling((tuning.skinny_rows, columns), 0, warps, stages)
    else:
        for side, warps, stages in tuning.others:
            yield one.tiling(side, 0, warps, stages)
