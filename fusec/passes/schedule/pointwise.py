"""GPU schedule of kernels without reductions: tiles along the fastest axis, 16 bytes a thread.

Rules (compiled offline for sm_90, 2026-11): two 16-byte vectors a thread and tensor keep about 64
KB in flight on an SM; more elements a thread than 16 bytes of the widest type cause layout
conversions. Tiles end at row ends: rows of 1024 elements have tiles of two rows, rows of 3072 have
three tiles. Accesses that are contiguous along different axes (a transpose) get a square tile.
"""

from __future__ import annotations

from fusec.ir.expr import Op
from fusec.ir.graph import FlatKernel, Kernel, kernel_nodes
from fusec.ir.index import Axis
from fusec.ir.machine import Machine, RowTuning
from fusec.passes.schedule.access import (
    LINE_BYTES,
    VECTOR_BYTES,
    accesses,
    fastest_axis,
    offsets_with_neighbour,
    step,
)
from fusec.passes.schedule.plan import Binding, LoopKind, Plan


def accepts(kernel: Kernel) -> bool:
    """Return True for kernels whose axes are all on the grid."""
    return not kernel.inside


def plan(kernel: FlatKernel, machine: Machine) -> Plan:
    """Return the plan of a pointwise kernel."""
    fast = fastest_axis(kernel, kernel.grid, offsets_with_neighbour(kernel))
    if fast is None:
        return Plan(tuple(Binding(a, LoopKind.GRID) for a in kernel.grid), warps=1)
    other = _other_fast_axis(kernel, fast)
    if other is not None:
        return _square(kernel, fast, other)
    tuning = machine.rows
    block = tile_elements(kernel, fast, tuning)
    warps = 2 * tuning.warps if _is_heavy(kernel) else tuning.warps
    if len(kernel.grid) == 1:
        return _plan(kernel, {fast: block}, warps)
    width = _width(fast.extent.hint(), block, tuning)
    rows = max(1, block // width)
    outer = _rows(kernel, fast, width, rows)
    rows = min(rows, power_of_two(outer.extent.hint()))
    return _plan(kernel, {fast: width, outer: rows}, warps)


def _rows(kernel: Kernel, fast: Axis, width: int, rows: int) -> Axis:
    """Return the axis of a tile's rows: the innermost, or one along which more bytes are shared.

    A tile loads once what does not vary along its rows: the angles of a rotary embedding, for many
    heads. Rows that are apart in memory have to be whole lines of a cache.
    """
    innermost, *others = [a for a in reversed(kernel.grid) if a is not fast]
    along = [a for a in accesses(kernel) if fast in a.offset.axes]
    if rows == 1 or any(width * a.itemsize < LINE_BYTES for a in along):
        return innermost
    able = [innermost, *(a for a in others if a.extent.hint() >= rows)]
    return min(able, key=lambda axis: sum(a.itemsize for a in along if axis in a.offset.axes))


def _width(extent: int, block: int, tuning: RowTuning) -> int:
    """Return the width of a tile along rows of ``extent`` elements: the widest that wastes few."""
    widest = min(block, power_of_two(extent))
    widths = [widest >> n for n in range(10) if widest >> n >= min(tuning.narrow, widest)]
    least = min(-(-extent // width) * width for width in widths)
    return next(w for w in widths if -(-extent // w) * w <= tuning.waste * least)


def _is_heavy(kernel: Kernel) -> bool:
    """Return True if a kernel calls a function that needs more registers than its operands."""
    dear = ("sin", "cos", "tan", "lgamma")
    return any(isinstance(n, Op) and n.name in dear for n in kernel_nodes(kernel))


def tile_elements(kernel: Kernel, fast: Axis, tuning: RowTuning) -> int:
    """Return the elements of a tile: two 16-byte vectors of the widest type for each thread.

    Values that do not vary along the fastest axis, such as a row's index or the seed of random
    numbers, are not in vectors and do not count.
    """
    widest = max((a.itemsize for a in accesses(kernel) if fast in a.offset.axes), default=4)
    return 32 * tuning.warps * 2 * max(1, VECTOR_BYTES // widest)


def power_of_two(extent: int) -> int:
    """Return the least power of two that is at least ``extent``."""
    return 1 << max(0, extent - 1).bit_length()


def _other_fast_axis(kernel: Kernel, fast: Axis) -> Axis | None:
    """Return a second axis along which large accesses are contiguous, while not along the first."""
    for access in accesses(kernel):
        if step(access, fast) in (0, 1) or step(access, fast) is None:
            continue
        for axis in kernel.grid:
            if axis is not fast and step(access, axis) == 1 and axis.extent.hint() >= 16:
                return axis if fast.extent.hint() >= 16 else None
    return None


def _square(kernel: Kernel, fast: Axis, other: Axis) -> Plan:
    widest = max(a.itemsize for a in accesses(kernel) if a.offset.axes)
    side = 64 if widest <= 2 else 32
    return _plan(kernel, {fast: side, other: side}, 8 if side == 64 else 4)


def _plan(kernel: Kernel, tiles: dict[Axis, int], warps: int) -> Plan:
    bindings = tuple(Binding(a, LoopKind.GRID, tiles.get(a, 1)) for a in kernel.grid)
    return Plan(bindings, warps=warps)
