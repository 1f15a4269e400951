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
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusec.ir.contraction import Factors
from fusec.ir.dtype import DType
from fusec.ir.expr import Expr, Load, Reduce, postorder
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.index import Axis
from fusec.ir.machine import Machine, Team
from fusec.ir.program import GROUPS
from fusec.passes.schedule.descriptors import is_describable
from fusec.passes.schedule.plan import Plan
from fusec.passes.schedule.tiling import (
    AxisUse,
    TileResources,
    Tiling,
    area,
    programs,
    tiling_of,
)


def with_roles(
    kernel: Kernel,
    offered: tuple[Plan, ...],
    products: Mapping[Reduce, Factors],
    work: TileResources,
    use: AxisUse,
    machine: Machine,
) -> tuple[Plan, ...]:
    """Return plans with, after the first with descriptors, its warp-specialized variants."""
    chosen = next((plan for plan in offered if plan.descriptors), None)
    if chosen is None or not machine.sm.group_registers or use.looped is None:
        return offered
    fewest, _ = work.tuning.slots
    if _is_plain(kernel, products, use):
        teams = work.tuning.teams
    elif _is_nested(products, work, use):
        teams = work.tuning.nested_teams
        fewest += _is_held(products)
    else:
        return offered
    at = offered.index(chosen) + 1
    found = (_plans(kernel, team, fewest, chosen, work, use, machine) for team in teams)
    return (*offered[:at], *(plan for plans in found for plan in plans), *offered[at:])


def _is_plain(kernel: Kernel, products: Mapping[Reduce, Factors], use: AxisUse) -> bool:
    """Return True if a kernel only sums products of matrices in memory, in one loop."""
    copied = all(map(_is_copied, _sides(products)))
    alone = all(n in products for n in kernel_nodes(kernel) if isinstance(n, Reduce))
    flat = len(use.tiled) == 2 and not use.whole and not use.outer
    return copied and alone and flat and use.tiled == kernel.grid[-2:]


def _is_nested(products: Mapping[Reduce, Factors], work: TileResources, use: AxisUse) -> bool:
    """Return True for nested products: inner ones of matrices, outer ones of their results."""
    copied, inner = sum(map(_is_copied, _sides(products))), len(work.inner)
    return 0 < inner < len(products) == copied - inner and len(use.tiled) == 1


def _is_held(products: Mapping[Reduce, Factors]) -> bool:
    """Return True if a matrix is an operand of two products: an inner and an outer one."""
    readers = Counter(side for parts in products.values() for side in {parts.left, parts.right})
    return max(readers.values()) > 1


def _sides(products: Mapping[Reduce, Factors]) -> list[Expr]:
    return [side for parts in products.values() for side in (parts.left, parts.right)]


def _is_copied(side: Expr) -> bool:
    return isinstance(side, Load) and side.dtype.itemsize == 2 and is_describable(side)


def _plans(
    kernel: Kernel,
    team: Team,
    fewest: int,
    chosen: Plan,
    work: TileResources,
    use: AxisUse,
    machine: Machine,
) -> Iterator[Plan]:
    """Yield a team's plan, if one of its tiles fits with at least ``fewest`` slots."""
    tilings = _tilings(kernel, team, work, use, machine)
    fitting = [t for t in tilings if t is not None and t.stages >= fewest]
    wanted = work.tuning.busy * machine.units * GROUPS[team.roles]
    enough = [t for t in fitting if programs(kernel, t) >= wanted]
    for tiling in (enough or fitting[-1:])[:1]:
        yield replace(
            chosen,
            bindings=tuple(
                replace(b, tile=tiling.lanes.get(b.axis, b.tile)) for b in chosen.bindings
            ),
            warps=team.warps,
            stages=tiling.stages,
            roles=team.roles,
            programs=machine.units,
        )


def _tilings(
    kernel: Kernel, team: Team, work: TileResources, use: AxisUse, machine: Machine
) -> Iterator[Tiling | None]:
    """Yield tilings with as many slots as fit, or None where the accumulators do not fit."""
    for side in team.sides:
        tiling = tiling_of(use, work, side, 0, team.warps, work.tuning.slots[0])
        whole = side[: len(use.tiled)] == tuple(tiling.lanes[axis] for axis in use.tiled)
        if work.inner and use.looped is not None:
            tiling = replace(tiling, lanes={**tiling.lanes, use.looped: side[1]})
            # Weights that are 0 in every iteration are constants, which LLVM puts behind a fence.
            whole = whole and use.looped.extent.hint() >= side[1]
        slots = _slots(kernel, team, tiling, work, use.looped, machine)
        held = _registers(kernel, work, tiling, use.looped)
        fits = whole and held <= machine.sm.group_registers
        yield replace(tiling, stages=slots) if fits else None


def _registers(kernel: Kernel, work: TileResources, tiling: Tiling, looped: Axis | None) -> float:
    """Return the registers of a thread for sums, scores, and weights of half their size.

    Each sum has weights of its own. A tile loaded by the epilogue counts half: some of it is used
    before the rest is loaded. A value of a row that the loop reduces and that is stored takes as
    many registers as a row of scores (Triton 3.7.1 spilled 1564 bytes of an attention in training
    otherwise).
    """
    sums, inner = (
        [area(axes, tiling.lanes) for axes in tiles] for tiles in (work.sums, work.inner)
    )
    operands = {axes for axes, _ in work.loads}
    loads = [n for n in kernel_nodes(kernel) if isinstance(n, Load) and n.axes not in operands]
    tiles = [n for n in loads if len(n.axes & tiling.lanes.keys()) > 1]
    held = sum(sums) + sum(inner) + len(sums) * max(inner, default=0) / 2
    held += sum(area(n.axes, tiling.lanes) * n.dtype.itemsize for n in tiles) / 8
    found = [s.expr for s in kernel.stores if len(s.expr.axes & tiling.lanes.keys()) < 2]
    rows = any(isinstance(n, Reduce) and looped in n.over for n in postorder(found))
    return (held + rows * sum(inner)) / (32 * tiling.warps)


def _slots(
    kernel: Kernel,
    team: Team,
    tiling: Tiling,
    work: TileResources,
    looped: Axis | None,
    machine: Machine,
) -> int:
    """Return how many slots of a ring fit, beside tiles loaded once and staged stores."""
    tiles = [(area(axes, tiling.lanes) * size, looped in axes) for axes, size in work.loads]
    slot = sum(count for count, loops in tiles if loops)
    other = sum(count for count, loops in tiles if not loops) + _staged(kernel, tiling)
    groups, (_, most) = GROUPS[team.roles], work.tuning.slots
    room = machine.sm.shared_bytes - work.tuning.barrier_bytes - groups * other
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
