"""GPU schedule of matrix products and what is fused around them: tiles for tensor cores.

Roles. Each contraction has a row axis (its left factor's), a column axis (its right factor's) and
an axis it sums over. One that varies along an axis that a later reduction runs over (the scores of
an attention) sums over lanes; any other sums in a loop of tiles. Columns that only some definitions
have (the values' head dimension) are lanes as a whole.

Rules (compiled offline for sm_90, 2026-11): 128x128x64 in 8 warps holds any epilogue without
spills; 128x256 where the epilogue is light and the tiles are many; an attention of 128 rows and 64
keys a step takes 8 warps.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.errors import InternalError
from fusec.ir.contraction import Factors, factors
from fusec.ir.dtype import F32
from fusec.ir.expr import Expr, Reduce, postorder
from fusec.ir.graph import Kernel
from fusec.ir.index import Axis
from fusec.passes.schedule.plan import Binding, Place, Plan
from fusec.passes.schedule.pointwise import power_of_two

MAX_LANES = 256
"""The widest axis that is lanes as a whole."""
MIN_LANES = 16
"""The narrowest tile of a tensor core's product."""
LOOP_BYTES = 128
"""Bytes along the axis of a product's loop: a swizzled row of shared memory."""
GROUP = 8


@dataclass(frozen=True, slots=True)
class Roles:
    """The axes of a kernel with contractions.

    Attributes:
        tiled: grid axes that have lanes, rows before columns.
        looped: the inside axis that runs in a loop of tiles, and plain loops around it.
        whole: inside axes that are lanes from end to end.
    """

    tiled: tuple[Axis, ...]
    looped: Axis | None
    outer: tuple[Axis, ...]
    whole: tuple[Axis, ...]


def contractions(kernel: Kernel) -> dict[Reduce, Factors]:
    """Return the contractions of a kernel and their factors."""
    found = {}
    for node in postorder(s.expr for s in kernel.stores):
        if isinstance(node, Reduce) and (parts := factors(node)) is not None:
            found[node] = parts
    return found


def find_roles(kernel: Kernel) -> Roles | None:
    """Return the roles of a kernel's axes, or None if this schedule cannot run it."""
    products = contractions(kernel)
    nodes = postorder(s.expr for s in kernel.stores)
    reductions = [n for n in nodes if isinstance(n, Reduce)]
    nested = _nested(reductions)
    loops = {a for n in products if n not in nested for a in n.over}
    loops |= {a for n in reductions if n not in products for a in n.over if not _fits_lanes(a)}
    whole = tuple(a for a in kernel.inside if a not in loops)
    if any(not _fits_lanes(a) for a in whole) or any(a.limit is not None for a in kernel.axes):
        return None
    looped = max(
        (a for a in kernel.inside if a in loops), key=lambda a: a.extent.hint(), default=None
    )
    outer = tuple(a for a in kernel.inside if a in loops and a is not looped)
    tiled: list[Axis] = []
    for parts in products.values():
        for side in (parts.left_axes, parts.right_axes):
            if side.isdisjoint((*whole, *([looped] if looped else []))):
                grid = [a for a in kernel.grid if a in side]
                if not grid:
                    return None
                best = max(grid, key=lambda a: (a.extent.hint(), kernel.grid.index(a)))
                tiled.extend([] if best in tiled else [best])
    tiled.sort(key=kernel.grid.index)
    roles = Roles(tuple(tiled), looped, outer, whole)
    nests = all(set(n.over) >= loops or loops.isdisjoint(n.over) for n in reductions)
    wide = all(a.extent.hint() >= MIN_LANES for a in (*tiled, *whole))
    return roles if nests and wide and _is_flat(nodes, products, roles) else None


def _nested(reductions: list[Reduce]) -> set[Reduce]:
    """Return the reductions whose values an enclosing loop reduces again, along its own axis."""
    found: set[Reduce] = set()
    for outer in reductions:
        if factors(outer) is None and all(map(_fits_lanes, outer.over)):
            continue  # the enclosing sum folds lanes of a tile that is complete
        for inner in postorder((outer.body,)):
            if isinstance(inner, Reduce) and not inner.axes.isdisjoint(outer.over):
                found.add(inner)
    return found


def _fits_lanes(axis: Axis) -> bool:
    return axis.extent.is_constant and axis.extent.const <= MAX_LANES


def _is_flat(nodes: list[Expr], products: dict[Reduce, Factors], roles: Roles) -> bool:
    """Return True if no value has more than two lane axes, and products have one on each side."""
    lanes = {*roles.tiled, *roles.whole}
    if roles.looped is not None:
        lanes.add(roles.looped)
    bodies = {n.body for n in products}
    if any(len(n.axes & lanes) > 2 for n in nodes if n not in bodies):
        return False
    for node, parts in products.items():
        sides = (parts.left_axes, parts.right_axes, frozenset(node.over))
        if any(len(s & lanes) != 1 for s in sides) or parts.shared & lanes:
            return False
    return True


def accepts(kernel: Kernel) -> bool:
    """Return True for a kernel with products whose axes have roles and whose loops nest."""
    if not contractions(kernel):
        return False
    return find_roles(kernel) is not None


def plans(kernel: Kernel) -> tuple[Plan, ...]:
    """Return plans of a kernel with products of matrices, the one chosen by rule first."""
    roles = find_roles(kernel)
    if roles is None:
        raise InternalError(f"no roles for the axes of {kernel.name}", stage="passes.schedule")
    chosen = _tiles(kernel, roles)
    found = [chosen, *_variants(kernel, roles, chosen)]
    return tuple(dict.fromkeys(_plan(kernel, roles, tiles) for tiles in found))


def _plan(kernel: Kernel, roles: Roles, tiling: _Tiling) -> Plan:
    tiles = tiling.lanes
    grid = [Binding(a, Place.GRID, tiles.get(a, 1)) for a in kernel.grid]
    loops = [Binding(a, Place.LOOP, tiles.get(a, 1)) for a in roles.outer]
    if roles.looped is not None:
        loops.append(Binding(roles.looped, Place.LOOP, tiles[roles.looped]))
    lanes = [Binding(a, Place.LANES, _lanes(a)) for a in roles.whole]
    grouped = len(roles.tiled) == 2 and roles.tiled == kernel.grid[-2:]
    return Plan(
        (*grid, *loops, *lanes),
        tiling.warps,
        peel=False,
        scratch=False,
        stages=tiling.stages,
        group=GROUP if grouped else 0,
        dots=True,
        online=True,
    )


def _lanes(axis: Axis) -> int:
    return max(MIN_LANES, power_of_two(axis.extent.hint()))


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Lanes of each axis that is cut, warps, and stages of the loop."""

    lanes: dict[Axis, int]
    warps: int
    stages: int


def _variants(kernel: Kernel, roles: Roles, chosen: _Tiling) -> list[_Tiling]:
    """Return other configurations that a race may try, likeliest first."""
    if roles.looped is None or len(roles.tiled) != (1 if roles.whole else 2):
        return []
    if roles.whole:
        (rows,) = roles.tiled
        shapes: tuple[tuple[tuple[int, ...], int, int, int], ...]
        shapes = (((128,), 64, 8, 2), ((128,), 128, 8, 2), ((64,), 64, 4, 2), ((128,), 64, 8, 3))
        axes: tuple[Axis, ...] = (rows,)
    else:
        narrow = chosen.lanes[roles.looped]
        shapes = (
            ((128, 256), narrow, 8, 3),
            ((256, 128), narrow, 8, 3),
            ((128, 128), narrow, 8, 4),
            ((128, 128), narrow, 4, 4),
            ((64, 256), narrow, 8, 3),
            ((64, 128), narrow, 4, 4),
            ((128, 64), narrow, 4, 4),
            ((64, 64), narrow, 4, 5),
        )
        axes = roles.tiled
    found = []
    for sides, step, warps, stages in shapes:
        lanes = dict(chosen.lanes)
        for axis, side in zip(axes, sides, strict=True):
            lanes[axis] = min(side, _lanes(axis))
        lanes[roles.looped] = min(step, _lanes(roles.looped))
        found.append(_Tiling(lanes, warps, stages))
    return found


def _tiles(kernel: Kernel, roles: Roles) -> _Tiling:
    """Return the configuration chosen by rule."""
    products = contractions(kernel)
    widest = max(2 if f.left.dtype is not F32 else 4 for f in products.values())
    tiles: dict[Axis, int] = {}
    for axis in roles.tiled:
        tiles[axis] = min(128, _lanes(axis))
    if roles.looped is not None:
        by = 64 if roles.whole else LOOP_BYTES // widest
        tiles[roles.looped] = min(by, _lanes(roles.looped))
    area = 1
    for axis in roles.tiled:
        area *= tiles[axis]
    if roles.whole:
        area = max([*(tiles[a] for a in roles.tiled), 1]) * max(_lanes(a) for a in roles.whole)
    warps = 8 if area >= 128 * 128 or len(products) > 2 else 4
    return _Tiling(tiles, warps, 2 if roles.whole else 3)
