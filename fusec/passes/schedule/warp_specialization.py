"""Plans with warp specialization: a producer warp loads tiles, consumer warps multiply them.

Consumer warps then compute no addresses, and the producer warp loads the next tile while they run
the epilogue of their products. It needs tensor cores that multiply asynchronously, and registers
that one warp can give to others: ``Resources.group_registers``.

Rules (compiled offline for sm_90, Triton 3.7.1, 2026-11). 128 registers of a thread for sums, 176
with scores and weights, spill nothing in any epilogue tried: a consumer has 240. A gradient of
128 features spilled 480 bytes at 224 (its keys', 64 queries a step) and 400 (its queries'). Rings
have as many slots as fit beside one tile of each stored type, which is staged in shared memory.

Measured (H100, 2026-11-26; docs/decisions/plans-by-rule.md): roles take 0.73 to 0.83 of the time of
tiles that all warps load where programs fill their waves, an attention with heads of 128 features
0.77; one of 64 features 1.1 to 1.8 (two programs without roles share a multiprocessor there). So by
rule a plan has roles where the former holds (``tiling_by_rule``); else a race may try them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from fusec.ir.cpu_tuning import Sides
from fusec.ir.expr import Expr, Load, postorder
from fusec.passes.schedule.descriptors import is_describable
from fusec.passes.schedule.plan import Plan
from fusec.passes.schedule.tiling import (
    ProductKernel,
    Tiling,
    area,
    filled,
    programs,
    staged_stores,
    tilings,
)


def with_roles(one: ProductKernel, offered: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Return plans with a warp-specialized variant.

    It comes first where the rule takes it, else fourth, so that a short race tries it.
    """
    chosen, tiling = next((plan for plan in offered if plan.descriptors), None), _tiling(one)
    if chosen is None or tiling is None:
        return offered
    at = 0 if tiling_by_rule(one) is not None else 3
    return (*offered[:at], _plan(one, chosen, tiling), *offered[at:])


def tiling_by_rule(one: ProductKernel) -> Tiling | None:
    """Return the tiling of a plan with roles that is chosen by rule, or None if none is.

    Its programs take several tiles each and fill their waves about as well as other tiles would.
    Nested products also have full steps, one inner product, and tiles of which one program alone
    fits a multiprocessor: otherwise two programs hide each other's softmax.
    """
    tiling, tuning, units = _tiling(one), one.work.tuning, one.machine.units
    if tiling is None or programs(one, tiling) < tuning.team_waves * units:
        return None
    (other, *_) = tilings(one)
    if one.work.inner:
        _, step = tuning.nested_team[0]
        narrow = one.use.looped is None or tiling.lanes[one.use.looped] < step
        if len(one.work.inner) > 1 or narrow or not _is_alone(one, other):
            return None
    gain = tuning.team_gain * filled(one, tiling, units)
    return tiling if gain > filled(one, other, units) else None


def _is_alone(one: ProductKernel, tiling: Tiling) -> bool:
    """Return True for tiles that leave no registers for a second program of eight warps."""
    return one.work.registers(tiling) >= one.machine.sm.registers // (64 * 8)


def _team(one: ProductKernel) -> Sides:
    """Return the tiles that consumer warps may have, best first; none for other kernels."""
    sm, use = one.machine.sm, one.use
    if one.is_skinny or use.looped is None or use.crossed is not None:
        return ()
    if not (sm.group_registers and sm.descriptors):
        return ()
    if _is_plain(one):
        return one.work.tuning.team
    return one.work.tuning.nested_team if _is_nested(one) else ()


def _is_plain(one: ProductKernel) -> bool:
    """Return True if a kernel only sums products of matrices in memory, in one loop."""
    use, sums = one.use, one.kernel.reductions
    flat = len(use.tiled) == 2 and not use.whole and not use.outer
    alone = flat and use.tiled == one.kernel.grid[-2:] and all(n in one.products for n in sums)
    return alone and all(_is_copied(side) for side in _sides(one)) and _lies_along_terms(one)


def _is_nested(one: ProductKernel) -> bool:
    """Return True for nested products: inner ones of matrices, outer ones of their results."""
    copied, inner = sum(map(_is_copied, _sides(one))), len(one.work.inner)
    if any(side.dtype.itemsize == 1 for side in _sides(one)):
        return False
    return 0 < inner < len(one.products) == copied - inner and len(one.use.tiled) == 1


def _is_held(one: ProductKernel) -> bool:
    """Return True if a matrix is an operand of two products: an inner and an outer one."""
    readers = Counter(side for p in one.products.values() for side in {p.left, p.right})
    return max(readers.values()) > 1


def _sides(one: ProductKernel) -> list[Expr]:
    return [side for p in one.products.values() for side in (p.left, p.right)]


def _is_copied(side: Expr) -> bool:
    return isinstance(side, Load) and side.dtype.itemsize <= 2 and is_describable(side)


def _lies_along_terms(one: ProductKernel) -> bool:
    """Return True unless tensor cores of 8 bits would read a matrix across its terms."""
    pairs = ((n, side) for n, p in one.products.items() for side in (p.left, p.right))
    return all(
        side.dtype.itemsize == 2 or any(map(side.buffer.offset(side.indices).steps_by_one, n.over))
        for n, side in pairs
        if isinstance(side, Load)
    )


def _tiling(one: ProductKernel) -> Tiling | None:
    """Return the tiling of consumer warps, if one fits with as many slots as it needs."""
    fewest, _ = one.work.tuning.slots
    fewest += bool(one.work.inner) and _is_held(one)
    fitting = [t for t in _tilings(one) if t.stages >= fewest]
    wanted = one.work.tuning.busy * one.machine.units
    enough = [t for t in fitting if programs(one, t) >= wanted]
    return next(iter(enough or fitting[-1:]), None)


def _plan(one: ProductKernel, chosen: Plan, tiling: Tiling) -> Plan:
    """Return the plan with roles: as one with descriptors, of other tiles."""
    lanes = tiling.lanes
    return replace(
        chosen,
        bindings=tuple(replace(b, tile=lanes.get(b.axis, b.tile)) for b in chosen.bindings),
        warps=tiling.warps,
        stages=tiling.stages,
        roles="cooperative",
        programs=one.machine.units,
    )


def _tilings(one: ProductKernel) -> Iterator[Tiling]:
    """Yield the tilings whose accumulators fit, with as many slots as fit."""
    tiled, looped, work = one.use.tiled, one.use.looped, one.work
    for side in _team(one):
        tiling = one.tiling(side, 0, work.tuning.team_warps, work.tuning.slots[0])
        whole = side[: len(tiled)] == tuple(tiling.lanes[axis] for axis in tiled)
        if work.inner and looped is not None:
            tiling = one.with_step(tiling, side[1])
            # Weights that are 0 in every iteration are constants, which LLVM puts behind a fence.
            whole = whole and looped.extent.hint() >= side[1]
        if whole and _registers(one, tiling) <= one.machine.sm.group_registers:
            yield replace(tiling, stages=_slots(one, tiling))


def _registers(one: ProductKernel, tiling: Tiling) -> float:
    """Return the registers of a thread for sums, scores, and weights of half their size.

    Each sum has weights of its own. A tile loaded by the epilogue counts half: some of it is used
    before the rest is loaded. So do one tile's sum that f32 takes (SwiGLU with 128 x 128 spills
    nothing), and a result without a product, as a GELU beside its gradient, which spilled 264
    bytes.
    """
    kernel, work, lanes = one.kernel, one.work, tiling.lanes
    sums, inner = ([area(axes, lanes) for axes in tiles] for tiles in (work.sums, work.inner))
    operands = {axes for axes, _ in work.loads}
    loads = [n for n in kernel.loads if n.axes not in operands]
    tiles = [n for n in loads if len(n.axes & lanes.keys()) > 1]
    held = sum(sums) + sum(inner) + len(sums) * max(inner, default=0) / 2
    held += sum(area(axes, lanes) for axes in work.parts) / 2
    apart = [s.expr for s in kernel.stores if not _multiplies(s.expr, one)]
    held += sum(area(n.axes, lanes) * n.dtype.itemsize for n in (*tiles, *apart)) / 8
    return held / (32 * tiling.warps)


def _multiplies(value: Expr, one: ProductKernel) -> bool:
    return any(node in one.products for node in postorder((value,)))


def _slots(one: ProductKernel, tiling: Tiling) -> int:
    """Return how many slots of a ring fit, beside tiles loaded once and staged stores."""
    work, looped = one.work, one.use.looped
    tiles = [(area(axes, tiling.lanes) * size, looped in axes) for axes, size in work.loads]
    slot = sum(count for count, loops in tiles if loops)
    other = sum(count for count, loops in tiles if not loops)
    other += sum(staged_stores(one.kernel, tiling.lanes).values())
    room = one.machine.sm.shared_bytes - work.tuning.barrier_bytes - other
    return min(work.tuning.slots[1], room // slot)
