"""Schedule of matrix products with prologues and epilogues: tiles in registers or in arrays.

Roles of axes. Each contraction has a row axis (its left factor's), a column axis (its right
factor's) and an axis it sums over. A nested contraction, whose result a later reduction sums along
an axis (the scores of an attention), sums over lanes; any other sums in a loop of tiles. Columns
that only some definitions have (the values' head dimension) are lanes without a loop.

Where two products sum along two such loops (dq along keys, dk along queries), one accumulates in an
array that lives across the outer loop; only CPUs have that (``AxisUse.crossed``).

A product may have few rows, or none (the scores of one query): missing rows of a tile are masked
lanes, and a product without a row axis is multiplied and summed by lanes, without a ``Dot``.

``tiling.py`` chooses the tiles for tensor cores, ``cached_tiling.py`` those for CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from fusec.errors import InternalError
from fusec.ir.contraction import Factors, factors, vector_factors, without_scales
from fusec.ir.dtype import BF16, BOOL, F32
from fusec.ir.expr import Expr, Load, Reduce, Scan, axes_in, children, postorder, reach
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.groups import group_axes, groups_of, pairs_of, rows_of_a_group
from fusec.ir.index import Axis, index, mod
from fusec.ir.machine import Machine
from fusec.ir.scaled import SCALED_TERMS
from fusec.ir.streamed import StreamedProduct, columns_in_panels, match_panels, reads_narrow
from fusec.passes.schedule.access import count
from fusec.passes.schedule.cached_tiling import cached_tilings, tile_bytes
from fusec.passes.schedule.descriptors import is_describable, with_descriptors
from fusec.passes.schedule.plan import Binding, LoopKind, Plan
from fusec.passes.schedule.tiling import (
    AxisUse,
    ProductKernel,
    Tiling,
    filled,
    find_work,
    has_room,
    is_small,
    programs,
    tiles_along,
    tilings,
)
from fusec.passes.schedule.warp_specialization import tiling_by_rule, with_roles


def contractions(kernel: Kernel, machine: Machine) -> dict[Reduce, Factors]:
    """Return the contractions of a kernel and their factors.

    Matrix-vector products count only where one sums the results of another in a loop (an attention
    of one query); otherwise the row schedule runs them.
    """
    reductions = [n for n in kernel_nodes(kernel) if isinstance(n, Reduce)]
    found = {n: parts for n in reductions if (parts := factors(n)) is not None}
    if not machine.sm.scaled:
        found = {n: without_scales(n, parts) for n, parts in found.items()}
    vectors = {n: parts for n in reductions if (parts := vector_factors(n)) is not None}
    nested = _nested(reductions, machine.lanes) if vectors else set()
    made = nested.intersection((*found, *vectors))
    tiles = made.intersection(found)
    vectors = {n: parts for n, parts in vectors.items() if not _scales_tiles(parts, tiles)}
    if made and any(_reads(n, made) for n in (*found, *vectors)):
        found.update(vectors)
    return found


def _scales_tiles(parts: Factors, tiles: set[Reduce]) -> bool:
    """Return True for a matrix of products' results times a vector that reads none of them: a sum
    of tiles, each times a scale."""
    vector, matrix = (parts.left, parts.right)[:: 1 if parts.right_axes else -1]
    return not tiles.isdisjoint(postorder((matrix,))) and tiles.isdisjoint(postorder((vector,)))


def _reads(node: Reduce, made: set[Reduce]) -> bool:
    return any(below in made for below in postorder(node.bodies))


def _find_axis_use(
    kernel: Kernel, products: dict[Reduce, Factors], machine: Machine
) -> AxisUse | None:
    """Return how a kernel's axes are used, or None if this schedule cannot run it."""
    nodes = kernel_nodes(kernel)
    reductions = [n for n in nodes if isinstance(n, Reduce)]
    most = machine.lanes
    nested = _nested(reductions, most)
    loops = {a for n in products if n not in nested for a in n.over}
    others = (n for n in reductions if n not in products)
    groups = group_axes(reductions)
    batch = frozenset[Axis]().union(*(parts.shared for parts in products.values()))
    apart = batch.union(groups)
    loops |= {a for n in others for a in n.over if a in apart or not _fits_lanes(a, most)}
    if machine.is_cpu:
        loops |= {a for n in nodes if isinstance(n, Scan) for a in n.over}
    if pairs_of(nodes) and _reads_products(products):
        return None
    whole = tuple(a for a in kernel.inside if a not in loops)
    if any(not _fits_lanes(a, most) for a in whole):
        return None
    around = _loops_around(kernel, reductions, products, loops, machine)
    looped = _longest(a for a in kernel.inside if a in loops - groups and a not in around)
    if any(a.limit is not None for a in kernel.axes if a is not looped):
        return None
    if looped in batch:
        looped = None  # a batch of products is summed: one of it in each iteration
    between = tuple(a for a in kernel.inside if a in loops and a not in around and a is not looped)
    crossed, sums_apart = _longest(around), bool(around)
    if machine.is_cpu and crossed and _fits_lanes(crossed, most):
        scores = [n for n in nested if loops.isdisjoint(n.over)]
        if all(crossed not in n.axes for n in scores):
            # Lanes, without a loop: in that, each tile would compute the same scores again.
            around, whole = tuple(a for a in around if a is not crossed), (*whole, crossed)
            crossed = None
    inside = {*whole, *(a for a in (looped, crossed) if a is not None)}
    panels = _in_panels(products, machine)
    converted = map(columns_in_panels, products) if machine.is_cpu else ()
    columns = {p.columns[-1] for p in panels}.union(a for a in converted if a is not None)
    tiled = _tiled(kernel, products, inside, columns)
    tiles = loops - groups
    nests = sums_apart or all(set(n.over) >= tiles or tiles.isdisjoint(n.over) for n in reductions)
    if tiled is None or not nests:
        return None
    panel = machine.loops.panel if panels else 0
    outer, tiled = ((*around, *between), tiled) if machine.is_cpu else (between, (*tiled, *around))
    use = AxisUse(tiled, looped, outer, whole, crossed, panel)
    return use if _is_flat(kernel, products, use) else None


def _reads_products(products: Iterable[Reduce]) -> bool:
    """Return True if a product multiplies what another one, or a sum over groups, has made."""
    below = (n for product in products for n in postorder(product.bodies))
    return any(isinstance(n, Reduce) for n in below)


def _longest(axes: Iterable[Axis]) -> Axis | None:
    return max(axes, key=lambda a: a.extent.hint(), default=None)


def _tiled(
    kernel: Kernel, products: dict[Reduce, Factors], inside: set[Axis], columns: set[Axis]
) -> tuple[Axis, ...] | None:
    """Return the grid axes that have lanes: one for each side of a product without inside axes.

    It is the longest, unless one is of the ``columns`` of panels: a panel is a tile. None if
    such a side has no axis on the grid.
    """
    tiled: set[Axis] = set()
    for parts in products.values():
        for side in (parts.left_axes, parts.right_axes):
            if side and side.isdisjoint(inside):
                grid = [a for a in kernel.grid if a in side]
                if not grid:
                    return None
                tiled.add(max(grid, key=lambda a: (a in columns, a.extent.hint(), grid.index(a))))
    return tuple(sorted(tiled, key=kernel.grid.index))


def _in_panels(products: Iterable[Reduce], machine: Machine) -> list[StreamedProduct]:
    """Return the products of a CPU's kernel whose weights lie in panels."""
    if not machine.is_cpu:
        return []
    return [p for n in products if (p := match_panels(n, machine.loops.panel))]


def _loops_around(
    kernel: Kernel,
    reductions: list[Reduce],
    products: dict[Reduce, Factors],
    loops: set[Axis],
    machine: Machine,
) -> tuple[Axis, ...]:
    """Return the outer loops of products that sum along two sets of loops; empty for other kernels.

    ``dq[m, d] = sum(n: ds * k)`` and ``dk[n, d] = sum(m: ds * q)`` share their tiles of ds, which
    is itself a product. The one that sums along the outer loops accumulates in an array along the
    inner ones: it is the one with the smaller array. On a GPU that is memory, to which programs
    add one sum, each for a tile of one axis: shared memory has no room for the tiles of two. There
    are products alone, as each program would compute what else is summed again.
    """
    alone = products.keys() == set(reductions) and all(n.dtype is F32 for n in products)
    if not machine.is_cpu and not (machine.sm.adds and alone):
        return ()
    summed = [n for n in reductions if not loops.isdisjoint(n.over)]
    sets = {frozenset(n.over) for n in summed}
    if len(sets) != 2 or loops != frozenset.union(*sets) or frozenset.intersection(*sets):
        return ()
    lengths: dict[frozenset[Axis], int] = {}
    for over in sets:
        added = [n for n in summed if frozenset(n.over) == over]
        if all(n in products for n in added) and (machine.is_cpu or len(added) == 1):
            lengths[over] = sum(count(n.axes - set(kernel.grid)) for n in added)
    if machine.is_cpu:
        fitting = [over for over, length in lengths.items() if length <= machine.cached.array]
    else:
        fitting = [over for over in lengths if len(over) == 1 and _may_be_added(kernel, over)]
    if not fitting:
        return ()
    least = min(fitting, key=lambda over: (lengths[over], -min(map(kernel.inside.index, over))))
    return tuple(a for a in kernel.inside if a in least)


def added_sums(kernel: Kernel, machine: Machine) -> tuple[Reduce, ...]:
    """Return the sums of a kernel that programs of a GPU add to memory, maybe none."""
    one = product_kernel(kernel, machine)
    crossed = None if one is None or machine.is_cpu else one.use.crossed
    return () if one is None else tuple(n for n in one.products if crossed in n.over)


def takes_wide_steps(kernel: Kernel, machine: Machine) -> bool:
    """Return True if programs that add to memory take steps as wide as their tiles."""
    one = product_kernel(kernel, machine)
    return one is not None and one.steps_by_side(tilings(one)[0])


def _may_be_added(kernel: Kernel, over: frozenset[Axis]) -> bool:
    """Return True if nothing in a kernel waits for its sums along some axes.

    What is computed from them is pointwise: another kernel does so.
    """

    def is_added(node: Expr) -> bool:
        return isinstance(node, Reduce) and over == frozenset(node.over)

    for store in kernel.stores:
        nodes = reach((store.expr,), lambda n: () if is_added(n) else children(n))
        sums = {is_added(n) for n in nodes if isinstance(n, Reduce)}
        if len(sums) > 1:
            return False
    return True


def _nested(reductions: list[Reduce], most: int) -> set[Reduce]:
    """Return the reductions whose results an enclosing reduction sums along a further axis."""
    found: set[Reduce] = set()
    for outer in reductions:
        if groups_of(outer) is not None:  # each term is a completed tile, or nothing
            continue
        # An enclosing sum over few lanes folds a completed tile, but not one over a batch of
        # products, which runs one after the other. A matrix-vector product that sums
        # the results of another one has no such tile: both run in one loop.
        folds = factors(outer) is None and all(_fits_lanes(axis, most) for axis in outer.over)
        weights = vector_factors(outer) is not None
        for inner in postorder(outer.bodies):
            if not isinstance(inner, Reduce) or inner.axes.isdisjoint(outer.over):
                continue
            parts = factors(inner)
            batched = parts is not None and not parts.shared.isdisjoint(outer.over)
            if not folds or batched or (weights and vector_factors(inner) is not None):
                found.add(inner)
    return found


def _fits_lanes(axis: Axis, most: int) -> bool:
    return axis.extent.is_constant and axis.extent.const <= most


def _is_flat(kernel: Kernel, products: dict[Reduce, Factors], use: AxisUse) -> bool:
    """Return True if no value has more than two lane axes, and each side of a product one.

    A store may repeat a value along axes that the value has not.
    """
    lanes = {*use.tiled, *use.whole}
    lanes.update(a for a in (use.looped, use.crossed) if a is not None)
    bodies = {n.body for n in products}
    tiles = [n.axes for n in kernel_nodes(kernel) if n not in bodies]
    tiles += [axes_in(store.indices) for store in kernel.stores]
    if any(len(axes & lanes) > 2 for axes in tiles):
        return False
    for node, parts in products.items():
        sides = [s for s in (parts.left_axes, parts.right_axes, frozenset(node.over)) if s]
        if any(len(s & lanes) != 1 for s in sides) or parts.shared & lanes:
            return False
    return True


def product_kernel(kernel: Kernel, machine: Machine) -> ProductKernel | None:
    """Return a kernel with products and the roles of its axes, or None if they have none."""
    products = contractions(kernel, machine)
    use = _find_axis_use(kernel, products, machine) if products else None
    if use is None:
        return None
    nested = _nested([n for n in kernel_nodes(kernel) if isinstance(n, Reduce)], machine.lanes)
    added = () if machine.is_cpu else tuple(n for n in products if use.crossed in n.over)
    work = find_work(kernel, products, nested.intersection(products), added, machine)
    pairs = pairs_of(kernel_nodes(kernel))
    return ProductKernel(kernel, machine, products, use, work, rows_of_a_group(pairs))


def accepts(kernel: Kernel, machine: Machine) -> bool:
    """Return True for a kernel with products whose axes have consistent roles and tiles fit."""
    one = product_kernel(kernel, machine)
    if one is None or _cuts_rows(one):
        return False
    (tiling, *_) = _tilings(one)
    if machine.is_cpu:
        by_lanes = any(not (p.left_axes and p.right_axes) for p in one.products.values())
        if by_lanes or any(not isinstance(p.few, Load) for p in _in_panels(one.products, machine)):
            return False
        return tile_bytes(one.work, tiling) <= machine.cache_bytes
    if one.use.crossed and not _adds_wide_tiles(one, tiling):
        return False
    return bool(one.use.tiled) or one.work.registers(tiling) <= machine.sm.tile_room(tiling.warps)


def _adds_wide_tiles(one: ProductKernel, tiling: Tiling) -> bool:
    """Return True for tiles of 16 bits that are added to memory few times, in steps of full rows.

    Others were slower than a kernel for each direction, by the model, or spilled (sm_90, Triton
    3.7.1, 2026-11).
    """
    scores = frozenset(a for a in (one.use.crossed, one.use.looped) if a is not None)
    wide = all(tiling.lanes[a] >= one.work.tuning.full_rows for a in scores)
    wide &= max(tiling.lanes[a] for a in scores) >= one.work.tuning.side
    tiles = [n for n in kernel_nodes(one.kernel) if n.axes >= scores]
    masks = [n for n in tiles if n.dtype is BOOL or isinstance(n, Load)]
    return wide and one.work.itemsize == BF16.itemsize and one.work.in_turn and len(masks) < 2


def _tilings(one: ProductKernel) -> tuple[Tiling, ...]:
    if not one.machine.is_cpu:
        return tilings(one)
    around = math.prod(a.extent.hint() for a in one.grid if a not in one.use.tiled)
    return cached_tilings(one.use, one.work, one.machine, around)


@dataclass(frozen=True, slots=True)
class ProcessorShare:
    """Occupancy of the machine by a kernel with products, and the split of its loop.

    Attributes:
        programs: tiles of the kernel.
        full: programs for each multiprocessor that reach its full rates.
        roles: whether its warps have roles by rule; its tiles then take ``filled`` of its lanes, in
            whole waves of programs that stay.
        narrow: whether the tiles of its products have fewer elements than 128 x 256.
        axis: the axis of its loop, if a split can keep more multiprocessors busy.
        terms: terms of the loop in each part.
        parts: number of parts, at the hints of sizes; 1 without a split.
        along: tiled axis -> number of tiles along it (GPU).
        passes: how often each tile runs, on average: once for each group of its rows.
        added: bytes of the sums that programs add to memory.
    """

    programs: int
    full: float
    roles: bool = False
    narrow: bool = False
    filled: float = 0.0
    axis: Axis | None = None
    terms: int = 0
    parts: int = 1
    along: Mapping[Axis, int] = field(default_factory=dict)
    passes: float = 1.0
    added: int = 0

    def busy(self, units: int, parts: int = 1) -> float:
        """Return the fraction of the rates of ``units`` multiprocessors that the kernel reaches."""
        if self.roles:
            return self.filled
        return min(1.0, max(self.programs * parts, 1) / (self.full * units))


def spread(kernel: Kernel, machine: Machine) -> ProcessorShare | None:
    """Return a kernel's occupancy, and the split of its loop where that is long enough.

    None if this schedule cannot run the kernel.
    """
    one = product_kernel(kernel, machine)
    if one is None:
        return None
    own = tiling_by_rule(one)
    tiling = own or _tilings(one)[0]
    use, count, axis = one.use, programs(one, tiling), one.use.looped
    if machine.is_cpu:
        full = machine.threads / machine.units if use.crossed else machine.cached.full
        return ProcessorShare(count, full)
    tuning = machine.tiles
    full = one.full(tiling)
    enough = (full if one.is_skinny else tuning.busy) * machine.units
    along = {a: tiles_along(a, tiling) for a in use.tiled}
    if own is not None:
        share = filled(one, tiling, machine.units)
        return ProcessorShare(count, full, True, _is_narrow(one, tiling), share, along=along)
    added = F32.itemsize * sum(math.prod(a.extent.hint() for a in n) for n in one.work.added)
    whole = ProcessorShare(count, full, along=along, passes=one.passes(tiling), added=added)
    if axis is None or count >= enough or not _can_be_cut(kernel, axis):
        return whole
    terms = axis.extent.hint()
    least = tuning.part_terms[bool(one.work.inner)]
    parts = min(round(tuning.waves * machine.units / count), terms // least)
    if parts < 2:
        return whole
    step = tiling.lanes[axis]
    share = -(-terms // (parts * step)) * step
    return replace(whole, axis=axis, terms=share, parts=-(-terms // share))


def _is_narrow(one: ProductKernel, tiling: Tiling) -> bool:
    tiles = math.prod(tiling.lanes[axis] for axis in one.use.tiled)
    return tiles * len(one.products) < 128 * 256


def _can_be_cut(kernel: Kernel, axis: Axis) -> bool:
    """Return True if the loop over an axis can be split: no store varies along it."""
    if axis.limit is not None or any(axis in i.axes for s in kernel.stores for i in s.indices):
        return False
    if pairs_of(kernel_nodes(kernel)):  # the rows of a group, or the products of each
        return False
    sums = [n for n in kernel_nodes(kernel) if isinstance(n, Reduce) and axis in n.over]
    return all(n.axes >= set(kernel.grid) for n in sums)


def _cuts_rows(one: ProductKernel) -> bool:
    """Return True if a reduction of a product forces tiles of few rows: partial column sums.

    Loading the product again costs less than computing it by narrow tiles.
    """
    short = {a for a in one.use.whole if a.extent.hint() < one.machine.tiles.full_rows}
    return any(
        not short.isdisjoint(n.over) and any(p in one.products for p in postorder(n.bodies))
        for n in kernel_nodes(one.kernel)
        if isinstance(n, Reduce) and n not in one.products
    )


def _converts_integers(one: ProductKernel) -> bool:
    """Return True if a product reads integers: what converts them need not round them again.

    Operands that are of 16 bits in memory stay so: the product widens them as it packs them (causal
    attention in bf16, training, takes 0.92 of the time; AVX2, one thread, 2026-11-28).
    """
    operands = (x for parts in one.products.values() for x in (parts.left, parts.right))
    return any(map(reads_narrow, operands))


def plans(kernel: Kernel, machine: Machine) -> tuple[Plan, ...]:
    """Return plans of a kernel with products of matrices, the one chosen by rule first."""
    one = product_kernel(kernel, machine)
    if one is None:
        raise InternalError(f"no use for the axes of {kernel.name}", stage="passes.schedule")
    if machine.is_cpu:
        bound = [_bindings(one, tiling) for tiling in _tilings(one)]
        wide = machine.widened if _converts_integers(one) else frozenset()
        return tuple(
            Plan(b, warps=0, peel=True, dots=True, online=True, mask_free=True, widened=wide)
            for b in bound
        )
    offered = with_descriptors(_tiled_plans(one), one.products, machine.sm)
    if machine.sm.tensor_columns:
        offered = tuple(dict.fromkeys(_in_order(one, plan) for plan in offered))
    first, *others = offered
    room = partial(has_room, kernel, shared_bytes=machine.sm.shared_bytes)
    described = bool(others) and others[0].descriptors and room(others[0])
    tiling = tilings(one)[0]
    copied = is_small(tiling, one) or others[0].stages > first.stages if described else False
    if copied or (described and one.steps_by_side(tiling)):
        offered = (others[0], first, *others[1:])
    offered = tuple(filter(room, offered))
    if first.adds_tiles:
        return (*offered, replace(first, descriptors=False, adds_tiles=False))
    return with_roles(one, _with_two_programs(one, offered))


def _tiled_plans(one: ProductKernel) -> tuple[Plan, ...]:
    """Return plans with tiles in registers, which threads load."""
    use, machine = one.use, one.machine
    # Prefetched tiles of rank 3 kept LLVM busy for minutes (one query of 4096 keys, sm_90).
    multiplies = any(p.left_axes and p.right_axes for p in one.products.values())
    grouped = len(use.tiled) == 2 and use.tiled == one.kernel.grid[-2:]
    offered = (
        Plan(
            _bindings(one, tiling),
            warps=tiling.warps,
            stages=tiling.stages if multiplies else 1,
            group=machine.tiles.group if grouped else 0,
            adds_tiles=bool(use.crossed) and machine.sm.descriptors,
            dots=True,
            online=True,
            mask_free=_runs_without_masks(one, tiling),
            tf32=machine.sm.tf32,
            promotes=machine.sm.coarse,
            scaled=_takes_scales(one, tiling),
        )
        for tiling in _tilings(one)
    )
    return tuple(dict.fromkeys(offered))


def _in_order(one: ProductKernel, plan: Plan) -> Plan:
    """Return a plan whose loop does nothing ahead where Triton orders it too little (3.7.1).

    All were found by emulating kernels for sm_100 (2026-11). Several products are added to each
    other: the accumulator has two buffers, and the first iteration reads the one before them.
    Several products multiply one computed operand: the next iteration's is stored in tensor memory
    when the first of them has ended. Products are nested: one proxy fence stands behind several
    cp.async, and some of them are awaited only behind it, so that the second product reads what no
    fence has made visible. Copies by descriptors need no fence.
    """
    looped = one.use.looped
    sides = [side for p in one.products.values() for side in (p.left, p.right)]
    computed = [side for side in sides if not isinstance(side, Load)]
    share = len(one.products) > len(one.work.sums) + len(one.work.inner)
    if share or len(set(computed)) < len(computed):
        return replace(plan, stages=1)
    if not one.work.inner:
        return plan
    read = {n for n in kernel_nodes(one.kernel) if isinstance(n, Load) and looped in n.axes}
    copied = all(n in sides and is_describable(n) and len(_ragged(n, plan)) < 2 for n in read)
    return plan if plan.descriptors and copied else replace(plan, stages=1)


def _ragged(load: Load, plan: Plan) -> list[Axis]:
    """Return the axes of a load whose last tile has a mask.

    The mask of two is a tile, which may be transposed for the load: no descriptor copies that.
    """
    tiles = [b for b in plan.bindings if b.tile > 1 and b.axis in load.axes]
    return [b.axis for b in tiles if mod(b.axis.extent, index(b.tile)) is not index(0)]


def _with_two_programs(one: ProductKernel, offered: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Return plans and, third, the first one with descriptors, limited to half the registers.

    It is for an attention's forward, one product nested in another, whose tiles would take all
    registers of a multiprocessor: one of two programs multiplies while the other runs its softmax.
    Head dimension 128 then has 128 registers and no spills, but ptxas waits for each product (its
    C7512): a race decides. A backward would spill (sm_90, Triton 3.7.1, 2026-11).
    """
    chosen = next((plan for plan in offered if plan.descriptors), None)
    if chosen is None or not one.machine.sm.from_shared:
        return offered
    most = one.machine.sm.registers // (64 * chosen.warps)
    (tiling, *_) = _tilings(one)
    if len(one.work.inner) != 1 or one.work.registers(tiling) < most:
        return offered
    return (*offered[:2], replace(chosen, registers=most), *offered[2:])


def _takes_scales(one: ProductKernel, tiling: Tiling) -> bool:
    """Return True if tensor cores take the scales of all products in tiles of this size.

    Of others Triton makes products in bf16 (3.7.1), by which a scale of 2^-127 is 0 and an infinity
    65536, or it fails, as with scales of 4-bit numbers in e4m3.
    """
    sm = one.machine.sm
    found = {n: parts for n, parts in one.products.items() if parts.scales}
    (rows, columns), unit = sm.scaled_tile, index(1)
    for node, parts in found.items():
        lanes = [tiling.lanes.get(a, 0) for a in node.over]
        if any(a.extent.hint() < SCALED_TERMS for a in node.over) or min(lanes) < SCALED_TERMS:
            return False
        own = parts.left_axes | parts.right_axes
        flat = {a for s in one.kernel.stores for a in own if s.indices[-1].coefficient(a) is unit}
        across = [tiling.lanes.get(a, 0) for a in own - flat]
        along = [tiling.lanes.get(a, 0) for a in own & flat]
        if min(across, default=0) < rows or min(along, default=0) < columns:
            return False
    return sm.scaled and bool(found)


def _runs_without_masks(one: ProductKernel, tiling: Tiling) -> bool:
    """Return True if a loop is emitted twice, with and without its mask.

    Two copies of a loop with computed operands make ptxas wait for each product before the next
    (its C7515), and take registers (``TileTuning.spare``), but none in the tiles of wide gradients
    if these end where tensors do, and no loop is around (else 24 to 88 bytes spill, or 724 where a
    third sum is added to memory), nor are there more keys than queries, for then the diagonal's
    tile may be none (20 bytes; sm_90, Triton 3.7.1, 2026-11).
    """
    use, work, sm = one.use, one.work, one.machine.sm
    sides = (side for p in one.products.values() for side in (p.left, p.right))
    loaded = all(isinstance(side, Load) for side in sides if use.looped not in side.axes)
    if work.stays or not loaded:
        return False
    if work.registers(tiling) <= work.tuning.spare * sm.tile_room(tiling.warps):
        return True
    if use.crossed and use.looped and use.crossed.extent.hint() > use.looped.extent.hint():
        return False
    wide = {(rows, warps) for rows, _, warps, _ in work.tuning.nested_gradients}
    rows = max((tiling.lanes[a] for a in use.tiled), default=0)
    return work.in_turn and tiling.is_whole and not use.outer and (rows, tiling.warps) in wide


def _bindings(one: ProductKernel, tiling: Tiling) -> tuple[Binding, ...]:
    use, tiles = one.use, tiling.lanes
    on_grid = one.kernel.grid if one.machine.is_cpu else one.grid
    grid = [Binding(a, LoopKind.GRID, tiles.get(a, 1)) for a in on_grid]
    loops = [Binding(a, LoopKind.LOOP, tiles.get(a, 1)) for a in use.outer]
    if use.looped is not None:
        loops.append(Binding(use.looped, LoopKind.LOOP, tiles[use.looped]))
    lanes = [Binding(a, LoopKind.LANES, tiles[a]) for a in use.whole]
    return (*grid, *loops, *lanes)
