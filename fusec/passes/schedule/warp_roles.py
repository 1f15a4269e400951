"""Plans in which warps have roles: one loads, and the others multiply what it has loaded.

Who multiplies then computes no address, and the warp that loads is at the next tile while the
others are at what follows their products. With two groups (ping-pong), one multiplies while the
other is at that. It needs tensor cores that multiply asynchronously and registers that one warp can
give to others: ``Resources.group_registers``.

Rules (compiled offline for sm_90, Triton 3.7.1, 2026-11). 128 registers of a thread for f32 tiles
spill nothing in any epilogue tried: a group has 232 or 240 a thread. Rings have as many slots as
fit beside one tile of each type that is stored, which goes by way of shared memory.

Nothing of this was measured on a device yet (2026-11), so no plan by rule has roles: a race tries
the first of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fusec.ir.contraction import Factors
from fusec.ir.expr import Load, Reduce
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.index import Axis
from fusec.passes.machine import Machine
from fusec.passes.schedule.descriptors import is_describable
from fusec.passes.schedule.plan import Plan
from fusec.passes.schedule.tiling import BUSY, Roles, Tiling, Work, area, programs, tiling_of


@dataclass(frozen=True, slots=True)
class Team:
    """Groups of warps that multiply.

    Attributes:
        roles: as of ``Plan``.
        warps: of each group.
        sides: rows and columns of its tile, the best first.
    """

    roles: str
    groups: int
    warps: int
    sides: tuple[tuple[int, int], ...]


TEAMS = (
    Team("cooperative", 1, 8, ((128, 256), (256, 128), (128, 128))),
    Team("pingpong", 2, 4, ((64, 256), (128, 128), (64, 128))),
)
FEWEST_SLOTS, MOST_SLOTS = 2, 6
"""Slots of a ring: one is multiplied while others are filled."""
BARRIER_BYTES = 1024
"""What barriers, and the beginnings of tiles at multiples of 1024 bytes, take at most."""


def with_roles(
    kernel: Kernel,
    offered: tuple[Plan, ...],
    products: Mapping[Reduce, Factors],
    work: Work,
    roles: Roles,
    machine: Machine,
) -> tuple[Plan, ...]:
    """Return plans and, behind the first with descriptors, what it becomes with roles of warps."""
    chosen = next((plan for plan in offered if plan.descriptors), None)
    if chosen is None or not machine.sm.group_registers or not _is_plain(kernel, products, roles):
        return offered
    at = offered.index(chosen) + 1
    return (*offered[:at], *_plans(kernel, chosen, work, roles, machine), *offered[at:])


def _is_plain(kernel: Kernel, products: Mapping[Reduce, Factors], roles: Roles) -> bool:
    """Return True if a kernel adds up products of matrices in memory, in one loop, and no more."""
    sides = [side for parts in products.values() for side in (parts.left, parts.right)]
    copied = all(isinstance(s, Load) and s.dtype.itemsize == 2 and is_describable(s) for s in sides)
    alone = all(n in products for n in kernel_nodes(kernel) if isinstance(n, Reduce))
    flat = len(roles.tiled) == 2 and roles.looped is not None and not (roles.outer or roles.whole)
    return copied and alone and flat and roles.tiled == kernel.grid[-2:]


def _plans(
    kernel: Kernel, chosen: Plan, work: Work, roles: Roles, machine: Machine
) -> Iterator[Plan]:
    for team in TEAMS:
        fitting = [t for t in _tilings(kernel, team, work, roles, machine) if t is not None]
        enough = [t for t in fitting if programs(kernel, t) >= BUSY * machine.units * team.groups]
        for tiling in (enough or fitting[-1:])[:1]:
            bindings = tuple(
                replace(b, tile=tiling.lanes.get(b.axis, b.tile)) for b in chosen.bindings
            )
            yield replace(
                chosen,
                bindings=bindings,
                warps=team.warps,
                stages=tiling.stages,
                roles=team.roles,
                programs=machine.units,
            )


def _tilings(
    kernel: Kernel, team: Team, work: Work, roles: Roles, machine: Machine
) -> Iterator[Tiling | None]:
    """Yield tilings with as many slots as fit, or None for each that does not."""
    for side in team.sides:
        tiling = tiling_of(roles, work, side, 0, team.warps, FEWEST_SLOTS)
        whole = side == tuple(tiling.lanes[axis] for axis in roles.tiled)
        slots = _slots(kernel, team, tiling, work, roles.looped, machine)
        fits = whole and work.registers(tiling) <= machine.sm.group_registers
        yield replace(tiling, stages=slots) if fits and slots >= FEWEST_SLOTS else None


def _slots(
    kernel: Kernel,
    team: Team,
    tiling: Tiling,
    work: Work,
    looped: Axis | None,
    machine: Machine,
) -> int:
    slot = sum(area(axes, tiling.lanes) * size for axes, size in work.loads if looped in axes)
    stored = {s.buffer.dtype: area(s.expr.axes, tiling.lanes) for s in kernel.stores}
    staged = sum(count * dtype.itemsize for dtype, count in stored.items())
    room = machine.sm.shared_bytes - BARRIER_BYTES - team.groups * staged
    return min(MOST_SLOTS, room // (slot * team.groups))
