"""Plans with warp specialization: a producer warp loads tiles, consumer warps multiply them.

Consumer warps then compute no addresses, and the producer warp loads the next tile while they run
the epilogue of their products. With two groups (ping-pong), one multiplies while the other runs its
epilogue. It needs tensor cores that multiply asynchronously, and registers that one warp can give
to others: ``Resources.group_registers``.

Rules (compiled offline for sm_90, Triton 3.7.1, 2026-11). 128 registers of a thread for sums, 176
with scores and weights, spill nothing in any epilogue tried: a group has 232 or 240. A gradient of
128 features spilled 480 bytes at 224 (its keys', 64 queries a step) and 400 (its queries'). Rings
have as many slots as fit beside one tile of each stored type, which is staged in shared memory.

None of this was measured on a device (2026-11), so no plan chosen by rule has roles: a race tries
the first of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from fusec.ir.dtype import DType
from fusec.ir.expr import Expr, Load, Reduce, postorder
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.machine import Team
from fusec.ir.program import GROUPS
from fusec.passes.schedule.descriptors import is_describable
from fusec.passes.schedule.plan import Plan
from fusec.passes.schedule.tiling import ProductKernel, Tiling, area, programs


def with_roles(one: ProductKernel, offered: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Return plans with, after the first with descriptors, its warp-specialized variants."""
    chosen = next((plan for plan in offered if plan.descriptors), None)
    asynchronous = one.machine.sm.group_registers and one.use.looped is not None
    if chosen is None or one.is_skinny or not asynchronous:
        return offered
    tuning = one.work.tuning
    fewest, _ = tuning.slots
    if _is_plain(one):
        teams = tuning.teams
    elif _is_nested(one):
        teams = tuning.nested_teams
        fewest += _is_held(one)
    else:
        return offered
    at = offered.index(chosen) + 1
    found = (_plans(one, team, fewest, chosen) for team in teams)
    return (*offered[:at], *(plan for plans in found for plan in plans), *offered[at:])


def _is_plain(one: ProductKernel) -> bool:
    """Return True if a kernel only sums products of matrices in memory, in one loop."""
    use, sums = one.use, (n for n in kernel_nodes(one.kernel) if isinstance(n, Reduce))
    flat = len(use.tiled) == 2 and not use.whole and not use.outer
    alone = flat and use.tiled == one.kernel.grid[-2:] and all(n in one.products for n in sums)
    return alone and all(map(_is_copied, _sides(one)))


def _is_nested(one: ProductKernel) -> bool:
    """Return True for nested products: inner ones of matrices, outer ones of their results."""
    copied, inner = sum(map(_is_copied, _sides(one))), len(one.work.inner)
    return 0 < inner < len(one.products) == copied - inner and len(one.use.tiled) == 1


def _is_held(one: ProductKernel) -> bool:
    """Return True if a matrix is an operand of two products: an inner and an outer one."""
    readers = Counter(side for p in one.products.values() for side in {p.left, p.right})
    return max(readers.values()) > 1


def _sides(one: ProductKernel) -> list[Expr]:
    return [side for p in one.products.values() for side in (p.left, p.right)]


def _is_copied(side: Expr) -> bool:
    return isinstance(side, Load) and side.dtype.itemsize == 2 and is_describable(side)


def _plans(one: ProductKernel, team: Team, fewest: int, chosen: Plan) -> Iterator[Plan]:
    """Yield a team's plan, if one of its tiles fits with at least ``fewest`` slots."""
    fitting = [t for t in _tilings(one, team) if t.stages >= fewest]
    wanted = one.work.tuning.busy * one.machine.units * GROUPS[team.roles]
    enough = [t for t in fitting if programs(one.kernel, t) >= wanted]
    for tiling in (enough or fitting[-1:])[:1]:
        yield replace(
            chosen,
            bindings=tuple(
                replace(b, tile=tiling.lanes.get(b.axis, b.tile)) for b in chosen.bindings
            ),
            warps=team.warps,
            stages=tiling.stages,
            roles=team.roles,
            programs=one.machine.units,
        )


def _tilings(one: ProductKernel, team: Team) -> Iterator[Tiling]:
    """Yield the tilings whose accumulators fit, with as many slots as fit."""
    tiled, looped, work = one.use.tiled, one.use.looped, one.work
    for side in team.sides:
        tiling = one.tiling(side, 0, team.warps, work.tuning.slots[0])
        whole = side[: len(tiled)] == tuple(tiling.lanes[axis] for axis in tiled)
        if work.inner and looped is not None:
            tiling = replace(tiling, lanes={**tiling.lanes, looped: side[1]})
            # Weights that are 0 in every iteration are constants, which LLVM puts behind a fence.
            whole = whole and looped.extent.hint() >= side[1]
        if whole and _registers(one, tiling) <= one.machine.sm.group_registers:
            yield replace(tiling, stages=_slots(one, team, tiling))


def _registers(one: ProductKernel, tiling: Tiling) -> float:
    """Return the registers of a thread for sums, scores, and weights of half their size.

    Each sum has weights of its own. A tile loaded by the epilogue counts half: some of it is used
    before the rest is loaded. A value of a row that the loop reduces and that is stored takes as
    many registers as a row of scores (Triton 3.7.1 spilled 1564 bytes of an attention in training
    otherwise).
    """
    kernel, work, lanes = one.kernel, one.work, tiling.lanes
    sums, inner = ([area(axes, lanes) for axes in tiles] for tiles in (work.sums, work.inner))
    operands = {axes for axes, _ in work.loads}
    loads = [n for n in kernel_nodes(kernel) if isinstance(n, Load) and n.axes not in operands]
    tiles = [n for n in loads if len(n.axes & lanes.keys()) > 1]
    held = sum(sums) + sum(inner) + len(sums) * max(inner, default=0) / 2
    held += sum(area(n.axes, lanes) * n.dtype.itemsize for n in tiles) / 8
    found = [s.expr for s in kernel.stores if len(s.expr.axes & lanes.keys()) < 2]
    rows = any(isinstance(n, Reduce) and one.use.looped in n.over for n in postorder(found))
    return (held + rows * sum(inner)) / (32 * tiling.warps)


def _slots(one: ProductKernel, team: Team, tiling: Tiling) -> int:
    """Return how many slots of a ring fit, beside tiles loaded once and staged stores."""
    work, looped = one.work, one.use.looped
    tiles = [(area(axes, tiling.lanes) * size, looped in axes) for axes, size in work.loads]
    slot = sum(count for count, loops in tiles if loops)
    other = sum(count for count, loops in tiles if not loops) + _staged(one.kernel, tiling)
    groups, (_, most) = GROUPS[team.roles], work.tuning.slots
    room = one.machine.sm.shared_bytes - work.tuning.barrier_bytes - groups * other
    return min(most, room // (slot * groups))


def _staged(kernel: Kernel, tiling: Tiling) -> int:
    """Return the bytes that stage stored tiles: one buffer for each type and number of columns."""
    found: dict[tuple[DType, int], int] = {}
    for store in kernel.stores:
        offset, axes = store.buffer.offset(store.indices), store.expr.axes
        columns = next((a for a in axes if offset.steps_by_one(a)), None)
        kind = store.buffer.dtype, 0 if columns is None else tiling.lanes.get(columns, 1)
        tile = area(axes, tiling.lanes) * store.buffer.dtype.itemsize
        found[kind] = max(tile, found.get(kind, 0))
    return sum(found.values())
