"""Tile sizes of a CPU's kernels with matrix products: arrays in a core's second-level cache.

A tile is long enough to keep the product's inner loop busy, and short enough for the cache to hold
each product's result, the values between two products, and operands, which may have to be copied.
Where an operand is computed, as int8 weights are converted, or packed for a CPU's tiles (AMX), more
rows share it, if threads have enough tiles.
Lanes are whole vectors; an axis without a loop has enough lanes to hold it. Where weights lie in
panels, a tile is a panel wide, and as high as its left operand, with all terms, stays in the cache.

Worked example, an attention with head dimension 64: 96 queries and 128 keys are scores and weights
of 2*48 KB, queries and sums of 2*24 KB, keys and values of 2*32 KB: 208 KB of 512.
"""

from __future__ import annotations

import math

from fusec.ir.cpu_tuning import CachedTuning
from fusec.ir.dtype import F32
from fusec.ir.index import Axis
from fusec.ir.machine import Machine
from fusec.passes.schedule.tiling import AxisUse, TileResources, Tiling, area, tiles_along


def cached_tilings(
    use: AxisUse, work: TileResources, machine: Machine, around: int = 1
) -> tuple[Tiling, ...]:
    """Return the largest tiling that fits the cache, as a tuple; the smallest if none does.

    Args:
        around: points of the grid's other axes, each of which has tiles of its own.
    """
    tuning = machine.cached
    least = tuning.computed_tiles * machine.threads / around
    packs = machine.bf16 == "tiles" and work.itemsize < F32.itemsize
    shapes = _shapes(use, work, tuning, least, packs=packs)
    found = [_tiling(use, sides, step, machine.vector) for sides, step in shapes]
    fitting = [t for t in found if tile_bytes(work, t) <= machine.cache_bytes]
    return tuple(fitting[:1] or found[-1:])


def _shapes(
    use: AxisUse, work: TileResources, tuning: CachedTuning, least: float, *, packs: bool
) -> list[tuple[tuple[int, int], int]]:
    steps = use.looped is not None or use.crossed is not None
    if len(use.tiled) < 2 or (work.inner and steps):
        shapes = tuning.nested if use.crossed is None else tuning.crossed
        return [((rows, rows), step) for rows, step in shapes]
    if use.panel:
        terms = use.looped.extent.hint() if use.looped else 1
        cached = tuning.panel_bytes // (F32.itemsize * terms)
        rows = next((r for r in tuning.panel_rows if r <= cached), tuning.panel_rows[-1])
        return [((rows, use.panel), tuning.terms)]
    short = use.outer and use.looped and 2 * use.looped.extent.hint() <= tuning.terms
    sides = tuning.short_sides if short else tuning.sides
    if packs and work.computed:
        return [(s, tuning.terms) for s in tuning.converted_sides]
    if work.computed or packs:
        tall = ((tuning.computed_rows, columns) for _, columns in sides)
        sides = *(s for s in tall if _programs(use, s) >= least), *sides
    return [(s, tuning.terms) for s in sides]


def _programs(use: AxisUse, sides: tuple[int, int]) -> int:
    tiling = Tiling(dict(zip(use.tiled, sides, strict=False)), 1, 1)
    return math.prod(tiles_along(axis, tiling) for axis in use.tiled)


def tile_bytes(work: TileResources, tiling: Tiling) -> int:
    """Return the bytes of a kernel's tiles in f32: results, values between products, operands."""
    tiles = [*work.sums, *work.inner, *work.inner[:1], *(axes for axes, _ in work.loads)]
    return F32.itemsize * sum(area(axes, tiling.lanes) for axes in tiles)


def _tiling(use: AxisUse, sides: tuple[int, int], step: int, vector: int) -> Tiling:
    lanes = {axis: whole_vectors(axis, axis.extent.const, vector) for axis in use.whole}
    for axis, side in zip(use.tiled, sides, strict=False):
        lanes[axis] = side if side == use.panel else even_lanes(axis, side, vector)
    loops = (use.looped,) if use.crossed is None else (use.crossed, use.looped)
    for loop, most in zip(loops, (step, sides[0]), strict=False):
        if loop is not None:
            lanes[loop] = even_lanes(loop, most, vector)
    return Tiling(lanes, 1, 1)


def even_lanes(axis: Axis, most: int, vector: int) -> int:
    """Return the lanes, at most ``most``, of each tile of an axis that is split into tiles.

    The fewest tiles, and these as even as whole vectors allow: 197 rows are 80, 80 and 37.
    """
    extent = axis.extent.hint()
    tiles = -(-extent // most)
    return -(-extent // (max(tiles, 1) * vector)) * vector


def whole_vectors(axis: Axis, most: int, vector: int) -> int:
    """Return the lanes of a tile: the smaller of ``most`` and the axis, in whole vectors."""
    return -(-min(most, axis.extent.hint()) // vector) * vector
