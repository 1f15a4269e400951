"""The schedule of matrix products and what is fused around them: tiles, of registers or arrays.

Use of axes. Each contraction has a row axis (its left factor's), a column axis (its right
factor's) and an axis it sums over. One that varies along an axis that a later reduction runs over
(the scores of an attention) sums over lanes; any other sums in a loop of tiles. Columns that only
some definitions have (the values' head dimension) are lanes as a whole.

Where two products sum along two such loops (dq along keys, dk along queries), one of them is in an
array that outlives the loop around, a CPU's way (``AxisUse.crossed``).

A product may have few rows, or none (the scores of one query): a row that is missing in a tile is
a masked lane, and a product without a row axis is multiplied and summed by lanes, with no ``Dot``.

How wide the tiles are, ``tiling.py`` says for tensor cores, ``cached_tiling.py`` for CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fusec.errors import InternalError
from fusec.ir.contraction import Factors, factors, vector_factors
from fusec.ir.expr import Expr, Load, Reduce, children, postorder
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.index import Axis, product
from fusec.passes.machine import Machine
from fusec.passes.schedule.cached_tiling import cached_tilings, tile_bytes
from fusec.passes.schedule.plan import Binding, LoopKind, Plan
from fusec.passes.schedule.tiling import (
    BUSY,
    AxisUse,
    TileResources,
    Tiling,
    find_work,
    is_skinny,
    programs,
    tiles_along,
    tilings,
)
from fusec.passes.schedule.warp_specialization import with_roles

MAX_LANES = 256
"""The widest axis that is lanes as a whole: a row of operands, so that scores are recomputed."""
GROUP = 8
"""Rows of tiles that run together along the columns."""
MIN_ROWS = 64
"""Rows of the narrowest tile that a group of four warps multiplies at full rate."""
LEAST_TERMS, LEAST_KEYS = 512, 128
"""Terms of a part of a split loop at least; where each term is a product itself, fewer."""
WAVES = 2
"""Programs for each multiprocessor that a split loop makes."""
FULL_FEW_ROWS = 1.5
"""Programs for each multiprocessor that keep the memory busy, where tiles have few rows."""
LONGEST_ARRAY = 1 << 20
"""Elements of an array in which products add up, one tile of it in each iteration."""
FULL_CORES = 0.25
"""Programs for each unit of a CPU, of which there are more than cores: tiles are long."""

REGISTERS = 65536
"""Those of a multiprocessor (sm_80 to sm_120)."""
SPARE = 0.9
"""The share of the registers for tiles up to which a loop is printed twice, with and without its
mask. At the limit itself the second one spills: 384 bytes of a gradient with 256 columns, 488 of
one with rotary embeddings (sm_90, Triton 3.7.1, 2026-11)."""


def contractions(kernel: Kernel) -> dict[Reduce, Factors]:
    """Return the contractions of a kernel and their factors.

    Products with a vector count where a loop weights what other ones make (an attention of one
    query): rows of a matrix times one vector are a row kernel's work.
    """
    reductions = [n for n in kernel_nodes(kernel) if isinstance(n, Reduce)]
    found = {n: parts for n in reductions if (parts := factors(n)) is not None}
    vectors = {n: parts for n in reductions if (parts := vector_factors(n)) is not None}
    nested = _nested(reductions) if vectors else set()
    made = nested.intersection((*found, *vectors))
    if made and any(_reads(n, made) for n in (*found, *vectors)):
        found.update(vectors)
    return found


def _reads(node: Reduce, made: set[Reduce]) -> bool:
    return any(below in made for below in postorder(node.bodies))


def find_axis_use(kernel: Kernel, *, arrays: bool = False) -> AxisUse | None:
    """Return how a kernel's axes are used, or None if this schedule cannot run it.

    Args:
        arrays: products may add up in private arrays.
    """
    products = contractions(kernel)
    nodes = postorder(s.expr for s in kernel.stores)
    reductions = [n for n in nodes if isinstance(n, Reduce)]
    nested = _nested(reductions)
    loops = {a for n in products if n not in nested for a in n.over}
    loops |= {a for n in reductions if n not in products for a in n.over if not _fits_lanes(a)}
    whole = tuple(a for a in kernel.inside if a not in loops)
    if any(not _fits_lanes(a) for a in whole):
        return None
    around = _loops_around(kernel, reductions, products, loops) if arrays else ()
    looped = _longest(a for a in kernel.inside if a in loops and a not in around)
    if any(a.limit is not None for a in kernel.axes if a is not looped):
        return None
    between = (a for a in kernel.inside if a in loops and a not in around and a is not looped)
    crossed = _longest(around)
    inside = {*whole, *(a for a in (looped, crossed) if a is not None)}
    tiled = _tiled(kernel, products, inside)
    nests = around or all(set(n.over) >= loops or loops.isdisjoint(n.over) for n in reductions)
    if tiled is None or not nests:
        return None
    use = AxisUse(tiled, looped, (*around, *between), whole, crossed)
    return use if _is_flat(nodes, products, use) else None


def _points(axes: Iterable[Axis]) -> int:
    return product(a.extent for a in axes).hint()


def _longest(axes: Iterable[Axis]) -> Axis | None:
    return max(axes, key=lambda a: a.extent.hint(), default=None)


def _tiled(
    kernel: Kernel, products: dict[Reduce, Factors], inside: set[Axis]
) -> tuple[Axis, ...] | None:
    """Return the axes of the grid that have lanes: one of each side of a product without any.

    None if such a side has no axis on the grid.
    """
    tiled: set[Axis] = set()
    for parts in products.values():
        for side in (parts.left_axes, parts.right_axes):
            if side and side.isdisjoint(inside):
                grid = [a for a in kernel.grid if a in side]
                if not grid:
                    return None
                tiled.add(max(grid, key=lambda a: (a.extent.hint(), kernel.grid.index(a))))
    return tuple(sorted(tiled, key=kernel.grid.index))


def _loops_around(
    kernel: Kernel, reductions: list[Reduce], products: dict[Reduce, Factors], loops: set[Axis]
) -> tuple[Axis, ...]:
    """Return the loops around others, where products sum along either: none where they do not.

    ``dq[m, d] = sum(n: ds * k)`` and ``dk[n, d] = sum(m: ds * q)`` share their tiles of ds, which
    is itself a product. One of them, over the loops around, is added up in an array along those
    inside: it is the one that takes least.
    """
    summed = [n for n in reductions if not loops.isdisjoint(n.over)]
    sets = {frozenset(n.over) for n in summed}
    if len(sets) != 2 or loops != frozenset.union(*sets) or frozenset.intersection(*sets):
        return ()
    lengths: dict[frozenset[Axis], int] = {}
    for over in sets:
        added = [n for n in summed if frozenset(n.over) == over]
        if all(n in products for n in added):
            lengths[over] = sum(_points(n.axes - set(kernel.grid)) for n in added)
    fitting = [over for over, length in lengths.items() if length <= LONGEST_ARRAY]
    if not fitting:
        return ()
    least = min(fitting, key=lambda over: (lengths[over], -min(map(kernel.inside.index, over))))
    return tuple(a for a in kernel.inside if a in least)


def _nested(reductions: list[Reduce]) -> set[Reduce]:
    """Return the reductions whose values an enclosing loop reduces again, along its own axis."""
    found: set[Reduce] = set()
    for outer in reductions:
        # An enclosing sum over few lanes folds those of a tile that is complete; a vector that
        # weights what another vector made has no tile: both run in one loop.
        folds = factors(outer) is None and all(map(_fits_lanes, outer.over))
        weights = vector_factors(outer) is not None
        for inner in postorder(outer.bodies):
            if not isinstance(inner, Reduce) or inner.axes.isdisjoint(outer.over):
                continue
            if not folds or (weights and vector_factors(inner) is not None):
                found.add(inner)
    return found


def _fits_lanes(axis: Axis) -> bool:
    return axis.extent.is_constant and axis.extent.const <= MAX_LANES


def _is_flat(nodes: list[Expr], products: dict[Reduce, Factors], use: AxisUse) -> bool:
    """Return True if no value has more than two lane axes, and no side of a product two."""
    lanes = {*use.tiled, *use.whole}
    lanes.update(a for a in (use.looped, use.crossed) if a is not None)
    bodies = {n.body for n in products}
    if any(len(n.axes & lanes) > 2 for n in nodes if n not in bodies):
        return False
    for node, parts in products.items():
        sides = [s for s in (parts.left_axes, parts.right_axes, frozenset(node.over)) if s]
        if any(len(s & lanes) != 1 for s in sides) or parts.shared & lanes:
            return False
    return True


def accepts(kernel: Kernel, machine: Machine) -> bool:
    """Return True for a kernel with products whose axes are used in one way and whose tiles fit."""
    products = contractions(kernel)
    use = find_axis_use(kernel, arrays=bool(machine.cache_bytes)) if products else None
    if use is None:
        return False
    work = _work(kernel, products, machine)
    (tiling, *_) = _tilings(kernel, use, work, machine)
    if _cuts_rows(kernel, products, use):
        return False
    if machine.cache_bytes:
        by_lanes = any(not (p.left_axes and p.right_axes) for p in products.values())
        return not by_lanes and tile_bytes(work, tiling) <= machine.cache_bytes
    return bool(use.tiled) or work.registers(tiling) <= machine.sm.tile_registers


def _tilings(
    kernel: Kernel, use: AxisUse, work: TileResources, machine: Machine
) -> tuple[Tiling, ...]:
    if machine.cache_bytes:
        return cached_tilings(use, work, machine)
    return tilings(kernel, use, work, machine)


@dataclass(frozen=True, slots=True)
class ProcessorShare:
    """How the work of a kernel with products is spread over multiprocessors.

    Attributes:
        programs: tiles of the kernel.
        full: programs for each multiprocessor that use all of its rates.
        axis: the axis of its loop, if that can be split to keep more of them busy.
        terms: of the loop in each part.
        parts: how many there are, at the hints of sizes; 1 without a split.
        along: how many tiles there are along each axis that has some (GPU).
    """

    programs: int
    full: float
    axis: Axis | None = None
    terms: int = 0
    parts: int = 1
    along: Mapping[Axis, int] = field(default_factory=dict)

    def busy(self, units: int, parts: int = 1) -> float:
        """Return the share of the rates of so many multiprocessors that the kernel can use."""
        return min(1.0, max(self.programs * parts, 1) / (self.full * units))


def spread(kernel: Kernel, machine: Machine) -> ProcessorShare | None:
    """Return how a kernel with products is spread, and how its loop is split where that is long.

    None if this schedule cannot run it.
    """
    products = contractions(kernel)
    use = find_axis_use(kernel, arrays=bool(machine.cache_bytes)) if products else None
    if use is None:
        return None
    work = _work(kernel, products, machine)
    (tiling, *_) = _tilings(kernel, use, work, machine)
    count, axis = programs(kernel, tiling), use.looped
    if machine.cache_bytes:
        return ProcessorShare(count, machine.threads / machine.units if use.crossed else FULL_CORES)
    few = is_skinny(use)
    full = FULL_FEW_ROWS if few else 1.0
    enough = (full if few else BUSY) * machine.units
    whole = ProcessorShare(count, full, along={a: tiles_along(a, tiling) for a in use.tiled})
    if axis is None or count >= enough or not _can_be_cut(kernel, axis):
        return whole
    terms = axis.extent.hint()
    least = LEAST_KEYS if work.inner else LEAST_TERMS
    parts = min(round(WAVES * machine.units / count), terms // least)
    if parts < 2:
        return whole
    step = tiling.lanes[axis]
    share = -(-terms // (parts * step)) * step
    return replace(whole, axis=axis, terms=share, parts=-(-terms // share))


def _can_be_cut(kernel: Kernel, axis: Axis) -> bool:
    """Return True if parts of an axis can be summed apart: nothing is stored along it."""
    if axis.limit is not None or any(axis in i.axes for s in kernel.stores for i in s.indices):
        return False
    sums = [n for n in kernel_nodes(kernel) if isinstance(n, Reduce) and axis in n.over]
    return all(n.axes >= set(kernel.grid) for n in sums)


def _cuts_rows(kernel: Kernel, products: dict[Reduce, Factors], use: AxisUse) -> bool:
    """Return True if a sum of a product's values cuts its tiles short: a part of column sums.

    To read the product once more costs less than to compute it by narrow tiles.
    """
    short = {a for a in use.whole if a.extent.hint() < MIN_ROWS}
    sums = [
        n
        for n in postorder(s.expr for s in kernel.stores)
        if isinstance(n, Reduce) and n not in products
    ]
    return any(
        not short.isdisjoint(n.over) and any(p in products for p in postorder(n.bodies))
        for n in sums
    )


def plans(kernel: Kernel, machine: Machine) -> tuple[Plan, ...]:
    """Return plans of a kernel with products of matrices, the one chosen by rule first."""
    use = find_axis_use(kernel, arrays=bool(machine.cache_bytes))
    if use is None:
        raise InternalError(f"no use for the axes of {kernel.name}", stage="passes.schedule")
    work = _work(kernel, contractions(kernel), machine)
    found = _tilings(kernel, use, work, machine)
    if machine.cache_bytes:
        return tuple(_cached_plan(kernel, use, tiling) for tiling in found)
    most = SPARE * machine.sm.tile_registers
    plain = _has_plain_operands(kernel, use)
    without_mask = (plain and work.registers(t) <= most for t in found)
    offered = (_plan(kernel, use, t, mask_free=s) for t, s in zip(found, without_mask, strict=True))
    return tuple(dict.fromkeys(replace(plan, tf32=machine.sm.tf32) for plan in offered))


def with_two_programs(
    kernel: Kernel, offered: tuple[Plan, ...], machine: Machine
) -> tuple[Plan, ...]:
    """Return plans and, third, the first with descriptors in half a multiprocessor's registers.

    Of an attention's forward, one product inside another, where tiles take all of those: one
    program multiplies while the other one is at its softmax. Head dimension 128 then has 128
    registers and no spills, but ptxas waits for each product (its C7512): a race has to decide. A
    backward spills in so few (sm_90, Triton 3.7.1, 2026-11).
    """
    chosen = next((plan for plan in offered if plan.descriptors), None)
    use = find_axis_use(kernel)
    if chosen is None or use is None or not machine.sm.from_shared:
        return offered
    work, most = _work(kernel, contractions(kernel), machine), REGISTERS // (64 * chosen.warps)
    (tiling, *_) = _tilings(kernel, use, work, machine)
    if len(work.inner) != 1 or work.registers(tiling) < most:
        return offered
    return (*offered[:2], replace(chosen, registers=most), *offered[2:])


def with_warp_roles(
    kernel: Kernel, offered: tuple[Plan, ...], machine: Machine
) -> tuple[Plan, ...]:
    """Return plans and, where a race finds them early, those in which warps have roles."""
    use, products = find_axis_use(kernel), contractions(kernel)
    if use is None or is_skinny(use):
        return offered
    work = _work(kernel, products, machine)
    return with_roles(kernel, offered, products, work, use, machine)


def _cached_plan(kernel: Kernel, use: AxisUse, tiling: Tiling) -> Plan:
    """Return the plan of a kernel whose tiles are arrays."""
    return Plan(
        _bindings(kernel, use, tiling), 1, peel=True, dots=True, online=True, mask_free=True
    )


def _has_plain_operands(kernel: Kernel, use: AxisUse) -> bool:
    """Return True if the operands that all iterations share are loaded for their products alone.

    Two loops around others, such as a row that a sum reads as well, make ptxas wait for each
    product before the next (its C7515, sm_90, Triton 3.7.1, 2026-11).
    """
    readers: dict[Expr, set[Expr]] = {}
    for node in postorder(s.expr for s in kernel.stores):
        for child in children(node):
            readers.setdefault(child, set()).add(node)
    products = contractions(kernel)
    bodies = {node.body for node in products}
    stored = {s.expr for s in kernel.stores}
    for parts in products.values():
        for side in (parts.left, parts.right):
            if use.looped in side.axes:
                continue
            if not isinstance(side, Load):
                return False
            if any(r in stored or readers[r] - bodies for r in readers[side] - bodies):
                return False
    return True


def _work(kernel: Kernel, products: dict[Reduce, Factors], machine: Machine) -> TileResources:
    nodes = postorder(s.expr for s in kernel.stores)
    nested = _nested([n for n in nodes if isinstance(n, Reduce)])
    return find_work(kernel, products, nested.intersection(products), tf32=machine.sm.tf32)


def _plan(kernel: Kernel, use: AxisUse, tiling: Tiling, *, mask_free: bool) -> Plan:
    grouped = len(use.tiled) == 2 and use.tiled == kernel.grid[-2:]
    # Tiles of rank 3, loaded ahead, kept LLVM busy for minutes (one query of 4096 keys, sm_90).
    multiplies = any(p.left_axes and p.right_axes for p in contractions(kernel).values())
    return Plan(
        _bindings(kernel, use, tiling),
        tiling.warps,
        stages=tiling.stages if multiplies else 1,
        group=GROUP if grouped else 0,
        dots=True,
        online=True,
        mask_free=mask_free,
    )


def _bindings(kernel: Kernel, use: AxisUse, tiling: Tiling) -> tuple[Binding, ...]:
    tiles = tiling.lanes
    grid = [Binding(a, LoopKind.GRID, tiles.get(a, 1)) for a in kernel.grid]
    loops = [Binding(a, LoopKind.LOOP, tiles.get(a, 1)) for a in use.outer]
    if use.looped is not None:
        loops.append(Binding(use.looped, LoopKind.LOOP, tiles[use.looped]))
    lanes = [Binding(a, LoopKind.LANES, tiles[a]) for a in use.whole]
    return (*grid, *loops, *lanes)
