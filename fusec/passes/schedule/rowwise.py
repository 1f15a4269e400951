"""GPU schedule of row kernels: a row in registers where it fits, else a loop over the row.

Rules (compile sweep for sm_90, 2026-11): up to 32768 live f32 elements a row without spills at 16
warps; ``warps = row / 1024`` of the row padded to a power of two (32 elements a thread); rows of at
most 256 elements share a program of 1024. Other inside axes (rows of a partial sum, images of a
batch) are loops around the row, which then has ``row / 256`` warps; rows shorter than 4096 beside
column sums share an iteration, and the loop prefetches the next rows. Such iterations have 4 or 8
warps, so that a program's barriers are few and another program runs meanwhile. Where an iteration
has a row for each warp, a warp has a row alone, as ``fold`` rows of lanes: its sums are shuffles,
without a barrier, and nothing is prefetched, for through shared memory each thread would exchange
its elements (1024 columns of a LayerNorm: 494 instructions instead of 642, sm_90, Triton 3.7.1).
Few programs without column sums load rows ahead, too. If there are very many short rows, a program
runs several, one after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from fusec.ir.expr import Buffer, Load, Reduce, loads
from fusec.ir.graph import FlatKernel, Kernel, kernel_nodes
from fusec.ir.index import Axis
from fusec.ir.machine import Machine, RowTuning
from fusec.ir.strides import begin_aligned
from fusec.passes.schedule.access import (
    VECTOR_BYTES,
    fastest_axis,
    limiting_axes,
    offsets_with_neighbour,
    vector_along,
)
from fusec.passes.schedule.nest import loop_nest
from fusec.passes.schedule.plan import Binding, LoopKind, Plan
from fusec.passes.schedule.pointwise import power_of_two


def accepts(kernel: FlatKernel) -> bool:
    """Return True if the contiguous axis is inside."""
    fast = fastest_axis(kernel, kernel.axes, offsets_with_neighbour(kernel))
    return bool(kernel.inside) and (fast is None or fast in kernel.inside)


def plans(kernel: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
    """Return plans of a row kernel, the one chosen by rule first.

    Several rows a program, one after the other, need no barrier, and as many instructions a row as
    one. Four at once in four warps need 5 barriers and 45 % more instructions (768 elements, sm_90,
    Triton 3.7.1, 2026-11): Triton distributes each row over all warps.
    """
    one = plan(kernel, machine)
    turns = _turns(kernel, one, machine)
    if turns == 1:
        return (one,)
    in_turn = _with_rows(one, chunk=turns)
    shared = replace(_with_rows(one, tile=4 * _rows(one).tile), warps=4)
    return (replace(in_turn, reloads=True), one, shared)


def _rows(plan: Plan) -> Binding:
    """Return the binding of the last grid axis."""
    return [b for b in plan.bindings if b.kind is LoopKind.GRID][-1]


def _with_rows(plan: Plan, *, tile: int = 0, chunk: int = 0) -> Plan:
    """Return the plan with another tile or chunk of the last grid axis."""
    rows = _rows(plan)
    other = replace(rows, tile=tile or rows.tile, chunk=chunk)
    return replace(plan, bindings=tuple(other if b is rows else b for b in plan.bindings))


def _turns(kernel: Kernel, one: Plan, machine: Machine) -> int:
    """Return how many tiles of rows a program of one warp takes in turn: a power of two."""
    if one.warps > 1 or not kernel.grid or any(b.kind is LoopKind.LOOP for b in one.bindings):
        return 1
    tile = _rows(one).tile
    (row, *others) = [b.axis for b in one.bindings if b.kind is LoopKind.LANES]
    if others:
        return 1
    tuning = machine.rows
    written = [s.buffer for s in kernel.stores if any(row in i.axes for i in s.indices)]
    sizes = [b.dtype.itemsize for b in (*_row_tiles(kernel, row), *written)]
    size = tile * row.extent.hint() * sum(sizes)
    programs = math.prod(a.extent.hint() for a in kernel.grid) // tile
    turns = 1
    enough = 2 * tuning.waves * machine.sm.programs * machine.units
    while turns * size < tuning.program_bytes and programs >= turns * enough:
        turns *= 2
    return turns


def plan(kernel: FlatKernel, machine: Machine) -> Plan:
    """Return the plan of a row kernel with one tile of rows a program."""
    fast = fastest_axis(kernel, kernel.axes, offsets_with_neighbour(kernel))
    # Without contiguous accesses: the innermost axis that may be lanes.
    able = [a for a in kernel.inside if a not in limiting_axes(kernel)]
    row = fast if fast is not None else [kernel.inside[-1], *able][-1]
    nest = loop_nest(kernel, row, machine)
    width, tuning = power_of_two(row.extent.hint()), machine.rows
    fits = _row_fits(kernel, row, tuning)
    parts = _parts(kernel, nest, row, tuning) if fits else ()
    outer = [a for a in nest if a is not row and a not in parts]
    sums = column_sums(kernel, row)
    loops = [Binding(a, LoopKind.LOOP) for a in outer]
    if not fits:
        grid = [Binding(a, LoopKind.GRID) for a in kernel.grid]
        tile, fold, warps = _looped(kernel, row, machine)
        looped = Binding(row, LoopKind.LOOP, tile, fold=fold)
        return Plan((*grid, *loops, looped), warps=warps, online=True)
    lanes = [Binding(a, LoopKind.LANES, power_of_two(a.extent.const)) for a in parts]
    lanes.append(Binding(row, LoopKind.LANES, max(width, 2)))
    tiles = _tiles(kernel, row)
    width *= tiles * math.prod(part.tile for part in lanes[:-1])
    ahead = bool(loops) and _loads_ahead(kernel, outer[-1], row, width, machine)
    if loops:
        fewer = sums >= tuning.many_sums or (_is_odd(kernel, row) and _is_wide(kernel, row, tuning))
        elements = tuning.loop_elements // 2 if fewer else tuning.loop_elements
        elements, _ = _element_loads(kernel, row, machine) or (elements, 0)
        if tiles > 1 and not fewer:
            elements = max(width, tiles * tuning.warp_row)
        if ahead:
            elements *= 2
        height = min(_floor(elements // width), power_of_two(outer[-1].extent.hint()))
        loops[-1] = Binding(outer[-1], LoopKind.LOOP, height)
    grid = [Binding(a, LoopKind.GRID) for a in kernel.grid]
    rows = 1
    if kernel.grid and not loops and width < 512:
        rows = min(_floor(1024 // width), power_of_two(kernel.grid[-1].extent.hint()), 64)
    if rows > 1:
        grid[-1] = Binding(kernel.grid[-1], LoopKind.GRID, rows)
    singly = bool(parts) and len(_row_tiles(kernel, row)) == 1 and not in_vectors(kernel, row)
    warps = min(8 if singly else 16, _floor(width * rows // 1024))
    if loops:
        warps = _loop_warps(kernel, row, width, loops[-1].tile, machine)
        width *= loops[-1].tile
    fold = _vectors_of_a_lane(kernel, row, lanes[-1].tile)
    if loops and sums and warps <= loops[-1].tile and tiles * fold > 1:
        lanes[-1], stages = replace(lanes[-1], fold=fold), 1
    elif loops and sums and min(tiles, loops[-1].tile) > 1:
        stages = 1
    else:
        stages = _stages(kernel, outer[-1], row, width, tuning) if loops and sums else 1
    if ahead:
        stages = min(2, _stages(kernel, outer[-1], row, width, tuning))
    reloads = bool(loops) and width >= tuning.reloaded
    packed = bool(loops) and tiles > 1 and stays_packed(kernel, row, width // (32 * warps), tuning)
    return Plan((*grid, *loops, *lanes), warps=warps, stages=stages, reloads=reloads, packed=packed)


def _floor(number: int) -> int:
    """Return the greatest power of two that is at most a number, or 1."""
    return max(1, power_of_two(number + 1) // 2)


def _loop_warps(kernel: Kernel, row: Axis, width: int, height: int, machine: Machine) -> int:
    """Return the warps of a program that takes ``height`` rows of ``width`` elements at a time."""
    sums, tiles, tuning = column_sums(kernel, row), _tiles(kernel, row), machine.rows
    sizes = [b.dtype.itemsize for b in _row_tiles(kernel, row)]
    _, share = _element_loads(kernel, row, machine) or (0, 256)
    if sums:
        share = 1024 if width <= tuning.warp_row else 512
    # Many sums beside the row's tiles: fewer of them a thread.
    fewer = height < 2 and sums >= tuning.many_sums
    share //= 2 if fewer or (sums and _is_wide(kernel, row, tuning)) else 1
    warps = min(16, power_of_two(-(-width * height // share)))
    if tiles == 1:
        return warps
    # Each thread has a vector of each part: else threads would exchange tiles.
    vectors = height * width // tiles * max(sizes, default=4) // (32 * VECTOR_BYTES)
    return min(warps, max(1, vectors))


def _looped(kernel: Kernel, row: Axis, machine: Machine) -> tuple[int, int, int]:
    """Return the elements of an iteration over a row, the rows of lanes that it folds, and warps.

    An iteration loads ``row_tile`` elements of 4 bytes over all tensors together. A row of lanes
    has 16 bytes of the widest tensor for each thread, so that a thread folds what it has loaded.
    """
    along = [n for n in kernel_nodes(kernel) if isinstance(n, Load) and row in n.axes]
    sizes = {n.buffer: n.dtype.itemsize for n in along}
    programs = math.prod(axis.extent.hint() for axis in kernel.grid)
    tuning = machine.rows
    share = 1 if programs >= machine.units else tuning.alone
    warps = min(16, tuning.loop_warps * share)
    loaded = 4 * tuning.row_tile * share // max(1, sum(sizes.values()))
    tile = min(power_of_two(loaded + 1) // 2, power_of_two(row.extent.hint()))
    vector = max(1, VECTOR_BYTES // max(sizes.values(), default=4))
    lanes = min(32 * warps * vector, tuning.row_tile // 4 * share)
    fold = max(1, min(tuning.folded // 2 if _is_odd(kernel, row) else tuning.folded, tile // lanes))
    tile = min(tile, lanes * fold)
    return max(tile, 16), fold, max(1, min(warps, tile // (32 * vector)))


def _tiles(kernel: Kernel, row: Axis) -> int:
    """Return how many tiles of one tensor are in registers: more than one where a row has parts."""
    along = {n for n in kernel_nodes(kernel) if isinstance(n, Load) and row in n.axes}
    return max(Counter(n.buffer for n in along).values(), default=1)


def _is_wide(kernel: Kernel, row: Axis, tuning: RowTuning) -> bool:
    """Return True if a thread's elements of rows would not fit its registers beside sums."""
    return sum(b.dtype.itemsize for b in _row_tiles(kernel, row)) >= tuning.wide_bytes


def _is_odd(kernel: Kernel, row: Axis) -> bool:
    """Return True if rows are not aligned to 16 bytes: each element needs its own address."""
    extent = row.extent
    sizes = [b.dtype.itemsize for b in _row_tiles(kernel, row)]
    return extent.is_constant and any(extent.const * size % 16 for size in sizes)


def _loads_ahead(kernel: Kernel, loop: Axis, row: Axis, width: int, machine: Machine) -> bool:
    """Return True if few programs take many rows of vectors, of ``width`` elements, in turn.

    Each has twice as many under way, half of them loaded ahead (16x128x56x56, forward and backward
    of a BatchNorm and ReLU, 8.6 and 16.2 us for 29.3 and 25.6; model of sm_90, 2026-11-29). Not
    where one wide row has more than an iteration's elements: 8192 of x and its gradient in f32
    spilled.
    """
    tuning = machine.rows
    if width > tuning.loop_elements and _is_wide(kernel, row, tuning):
        return False
    turns = loop.extent.hint() // _floor(2 * tuning.loop_elements // width)
    size = sum(b.dtype.itemsize for b in _row_tiles(kernel, row))
    few = math.prod(axis.extent.hint() for axis in kernel.grid) <= machine.parts
    many = turns * size >= tuning.turns_bytes
    return few and many and not column_sums(kernel, row) and in_vectors(kernel, row)


def _element_loads(kernel: Kernel, row: Axis, machine: Machine) -> tuple[int, int] | None:
    """Return the elements of an iteration, and of a warp, for rows that are loaded one by one.

    None with column sums, and for other rows. A thread has 8 or 16, of which ptxas issues the loads
    together: by the model of sm_90 a BatchNorm's gradient of 512x2048x7x7 takes 158 us for 228 with
    16 warps, of 100x512x27x27 93 for 112 (2026-11-29). Few programs of one tensor need more warps.
    """
    if column_sums(kernel, row) or in_vectors(kernel, row):
        return None
    elements, short = machine.rows.loop_elements, row.extent.hint() < machine.rows.loop_row
    programs = math.prod(axis.extent.hint() for axis in kernel.grid)
    if short and programs >= 8 * machine.units:
        return elements // 4, 256
    if len(_row_tiles(kernel, row)) > 1:
        return elements, 512
    return (elements // 2, 128) if short and programs >= machine.units else None


def in_vectors(kernel: Kernel, row: Axis) -> bool:
    """Return True if rows of each tensor begin at multiples of 8 bytes."""
    sizes = (b.dtype.itemsize for b in _row_tiles(kernel, row))
    return row.extent.is_constant and begin_aligned(row.extent.const, sizes)


def _stages(kernel: Kernel, loop: Axis, row: Axis, elements: int, tuning: RowTuning) -> int:
    """Return the pipeline stages of a loop over rows: up to 4, as shared memory allows."""
    nodes = kernel_nodes(kernel)
    read = {n.buffer for n in nodes if isinstance(n, Load) and {loop, row} <= n.axes}
    size = elements * sum(b.dtype.itemsize for b in read)
    return max(1, min(4, 1 + tuning.ahead_bytes // size)) if size else 1


def _vectors_of_a_lane(kernel: Kernel, row: Axis, width: int) -> int:
    """Return how many vectors of a row each thread of a warp loads, if the warp has the row alone.

    1 where tensors differ in their type: threads would exchange whole tiles.
    """
    sizes = {b.dtype.itemsize for b in _row_tiles(kernel, row)}
    if len(sizes) != 1:
        return 1
    return max(1, width // (32 * _vector_along(kernel, row)))


def _vector_along(kernel: Kernel, row: Axis) -> int:
    """Return the elements that one access may load of a row of each tensor."""
    along = {n for n in kernel_nodes(kernel) if isinstance(n, Load) and row in n.axes}
    return min((vector_along(n, row) for n in along if len(n.axes) > 1), default=1)


def _parts(
    kernel: Kernel, nest: tuple[Axis, ...], row: Axis, tuning: RowTuning
) -> tuple[Axis, ...]:
    """Return the parts' axis of a split row, as a tuple, if all parts fit registers together.

    Each reduction runs over the row, over its parts, or over both: no loop carries a value. Rows
    that are loaded in vectors are swept over again instead where a second program would not fit
    beside the first: 64 images of 14 x 14 of two tensors, 21 us for 35 (model of sm_90, 2026-11).
    """
    others = tuple(a for a in nest if a is not row)
    whole = all(a.extent.is_constant and a.limit is None for a in (*others, row))
    if len(others) != 1 or not whole or column_sums(kernel, row):
        return ()
    sizes = [b.dtype.itemsize for b in _row_tiles(kernel, row)]
    return others if holds_parts(others[0].extent.const, row.extent.const, sizes, tuning) else ()


def holds_parts(parts: int, row: int, sizes: Collection[int], tuning: RowTuning) -> bool:
    """Return True if registers hold all parts of a row, ``parts`` times ``row`` elements.

    Args:
        sizes: bytes of an element of each tensor that has them.
    """
    length = power_of_two(parts) * power_of_two(row)
    most = tuning.resident_parts // (2 if begin_aligned(row, sizes) else 1)
    fits = length <= 4 * tuning.loop_elements and length * sum(sizes) <= most
    return row < tuning.loop_row and fits


def column_sums(kernel: Kernel, row: Axis) -> int:
    """Return how many reductions vary along the row, in all of its parts together."""
    found = [n for n in kernel_nodes(kernel) if isinstance(n, Reduce) and row in n.axes]
    return -(-len(found) // _tiles(kernel, row))


def is_resident(row: Axis, tuning: RowTuning) -> bool:
    """Return True if a whole row stays in registers."""
    fits = row.extent.is_constant and power_of_two(row.extent.const) <= tuning.resident_row
    return fits and row.limit is None


def sums_fit(kernel: Kernel, row: Axis, tuning: RowTuning) -> bool:
    """Return True if a row kernel's column sums, if any, fit the registers beside a row."""
    sums = column_sums(kernel, row)
    if not sums or not _row_fits(kernel, row, tuning):
        return not sums
    beside = _row_bytes(kernel, row) <= tuning.resident_bytes_beside
    return beside and _held(kernel, row) <= tuning.resident_tiles


def _held(kernel: Kernel, row: Axis) -> int:
    """Return the elements of column sums, and of the rows beside them, that registers hold."""
    return held_tiles(kernel, row) * _tiles(kernel, row) * power_of_two(row.extent.const)


def held_tiles(kernel: Kernel, row: Axis) -> int:
    """Return how many column sums, and rows beside them, registers hold for each element."""
    return column_sums(kernel, row) + len(_row_tiles(kernel, row))


def stays_packed(kernel: Kernel, row: Axis, elements: int, tuning: RowTuning) -> bool:
    """Return True for column sums beside rows of 16 bits whose values would not fit registers.

    Args:
        elements: those of a row that a thread has.
    """
    halves = all(b.dtype.itemsize == 2 for b in _row_tiles(kernel, row))
    much = 0 < tuning.thread_values < held_tiles(kernel, row) * elements
    return column_sums(kernel, row) > 0 and halves and much


def vector_of(kernel: Kernel, row: Axis) -> int:
    """Return the elements of 16 bytes of the widest tensor with rows."""
    return VECTOR_BYTES // max((b.dtype.itemsize for b in _row_tiles(kernel, row)), default=4)


def _row_fits(kernel: Kernel, row: Axis, tuning: RowTuning) -> bool:
    """Return True if a whole row of all tensors that are summed along it fits the registers."""
    return is_resident(row, tuning) and _row_bytes(kernel, row) <= tuning.resident_bytes


def _row_bytes(kernel: Kernel, row: Axis) -> int:
    """Return the bytes of a row over all tensors that its reductions read: most are used again.

    Weights count like tensors with rows: only a backward reduces expressions that contain them.
    """
    sums = (n for n in kernel_nodes(kernel) if isinstance(n, Reduce) and row in n.over)
    held = {n.buffer for n in loads(b for s in sums for b in s.bodies) if row in n.axes}
    width = power_of_two(row.extent.const) * power_of_two(_tiles(kernel, row))
    return width * sum(b.dtype.itemsize for b in held)


def _row_tiles(kernel: Kernel, row: Axis) -> set[Buffer]:
    """Return the tensors that are loaded along a row and vary from row to row."""
    along = [n for n in kernel_nodes(kernel) if isinstance(n, Load) and row in n.axes]
    return {n.buffer for n in along if len(n.axes) > 1}
