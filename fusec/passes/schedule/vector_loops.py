"""The CPU's schedule: parallel loops on the grid, loops inside, lanes along the fastest axis.

The lane axis is innermost, whether it is on the grid or inside, so that accesses are sequential; a
reduction over an outer loop then accumulates in a private array that stays in the core's cache. A
kernel without inside axes (pointwise) gets chunks of the lane axis as grid points. Where the loops
are a small window, walk through panels or scan, they are innermost: the accumulator stays in a
register.
Where a pointwise kernel loads contiguously along one axis and stores along another, lanes follow
the stores, and loads are transposed, in blocks of W x W.
"""

from __future__ import annotations

from fusec.ir.cpu_tuning import LoopTuning
from fusec.ir.dtype import BOOL, F32, HALF
from fusec.ir.expr import Load, Op, Reduce, Scan, postorder
from fusec.ir.graph import FlatKernel, Kernel, kernel_nodes
from fusec.ir.index import Axis, index, product
from fusec.ir.machine import Machine
from fusec.ir.monoid import ARGMAX, ARGMIN, EXPSUM, SUM
from fusec.ir.scalar import SCALAR_OPS
from fusec.ir.serial import hits_of, scan_of, serial_reductions, shared_axes
from fusec.ir.streamed import WIDEST_PANEL, StreamedProduct, match_skinny, reads_narrow
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.scans import run_scans
from fusec.passes.schedule.access import count, fastest_axis, is_transposed, offsets_with_neighbour
from fusec.passes.schedule.nest import loop_nest, nest_order
from fusec.passes.schedule.plan import Binding, LoopKind, Plan
from fusec.passes.schedule.pointwise import power_of_two


def loop_plans(kernel: FlatKernel, machine: Machine) -> tuple[Plan, ...]:
    """Return the single plan of a kernel for a CPU, as a tuple."""
    tuning = machine.loops
    plan = Plan(
        _bindings(kernel, machine),
        warps=0,
        peel=True,
        stages=_ahead(kernel, machine),
        kept_cost=tuning.kept_cost,
        kept_bytes=tuning.kept_bytes,
    )
    return (plan,)


def _streams(kernel: Kernel, machine: Machine) -> list[StreamedProduct]:
    """Return the sums of a kernel that stream weights, each for a single row of a block."""
    found = (match_skinny(n, machine.loops.always) for n in kernel.reductions)
    return [product for product in found if product is not None]


def _ahead(kernel: Kernel, machine: Machine) -> int:
    """Return the prefetch distance of weights, in iterations; 1 where none are streamed.

    Narrow weights are those of the next grid point: their rows are too short to run ahead in.
    """
    streams, tuning = _streams(kernel, machine), machine.loops
    if any(p.panel > WIDEST_PANEL for p in streams):
        return tuning.ahead
    if panels := [p.panel * p.itemsize for p in streams if p.panel]:
        return max(1, tuning.ahead_bytes // max(panels))
    if streams and not all(p.narrow for p in streams):
        return tuning.ahead
    read = kernel.loads
    columns = streams[0].columns[:1] if streams else kernel.grid
    if not streams:
        read = tuple(n for n in read if n.dtype.is_integer) if _is_packed(kernel) else ()
    offsets = [load.buffer.offset(load.indices) for load in read]
    steps = (offset.coefficient(column) for offset in offsets for column in columns)
    return max((s.hint() // machine.vector for s in steps if s is not None), default=1)


def _is_packed(kernel: Kernel) -> bool:
    """Return True for products with integers of which several are in a word: sums of terms each."""
    sums = kernel.reductions
    several = bool(sums) and all(len(n.over) > 1 and n.dtype is F32 for n in sums)
    return several and all(reads_narrow(store.expr) for store in kernel.stores)


def _bindings(kernel: FlatKernel, machine: Machine) -> tuple[Binding, ...]:
    """Return the binding of each axis of a kernel, in vectors of the machine's width."""
    both = transposed_axes(kernel, machine)
    if both is not None:
        return _transposed(kernel, *both, machine)
    lane = lane_axis(kernel, machine)
    if lane is not None and _shares_dear_values(kernel, lane, machine.loops):
        return _tiles_of_rows(kernel, lane, machine)
    grid = [a for a in kernel.grid if a is not lane]
    bindings = [Binding(a, LoopKind.GRID) for a in grid]
    inside = [a for a in loop_nest(kernel, lane, machine) if a is not lane]
    tiles = machine.loops.sum_tiles  # here of one element
    loops = [
        Binding(a, LoopKind.LOOP, 1, tiles if _sums_many(kernel, a, tiles) else 0) for a in inside
    ]
    if lane is None:
        return (*bindings, *loops)
    shared = next(iter(shared_axes(kernel)), None)
    if shared is not None and lane.extent.hint() >= machine.loops.shared * machine.vector:
        grid.append(shared)
        rows = -(-shared.extent.hint() // max(machine.threads, 1))
        loops[inside.index(shared)] = Binding(shared, LoopKind.GRID, 1, max(rows, 1))
    own = _lanes(kernel, lane, machine, count(tuple(grid)))
    if _scans_rows(kernel, lane, inside, machine):
        chunk = _chunk(lane, machine.vector, count(tuple(grid)), machine.loops)
        columns = min(chunk, machine.loops.scanned // machine.vector)
        return (*bindings, *loops, Binding(lane, LoopKind.GRID, machine.vector, columns))
    walks = any(p.panel for p in _streams(kernel, machine))
    walks = walks or any(isinstance(n, Scan) for n in kernel_nodes(kernel))
    if lane not in kernel.inside and (walks or _is_window(inside, machine.loops.window)):
        return (*bindings, own, *loops)
    return (*bindings, *loops, own)


def _shares_dear_values(kernel: FlatKernel, lane: Axis, tuning: LoopTuning) -> bool:
    """Return True for short rows of a pointwise kernel that share what takes long, such as a gate.

    It is computed for a tile of rows at once, in vectors, in place of one by one: a product with
    the sigmoid of each channel of 32x1024x3x3 takes 0.36 of the time, of 8x2048x7x7 0.83 (one
    thread, AVX-512, 2026-11-30). Tiles hold plain floats; nothing is drawn or gathered.
    """
    if kernel.inside or len(kernel.grid) < 2 or lane is not kernel.grid[-1]:
        return False
    rows, nodes = kernel.grid[-2], kernel_nodes(kernel)
    short = lane.extent.is_constant and lane.extent.const <= tuning.shared_row
    if not short or rows.limit is not None or lane.limit is not None:
        return False
    ops = [n for n in nodes if isinstance(n, Op)]
    drawn = any(n.name == "random" for n in ops)
    plain = not drawn and all(n.dtype in (F32, BOOL, *HALF) for n in nodes)
    if not plain or any(store.guard is not None for store in kernel.stores):
        return False
    shared = [n for n in ops if rows in n.axes and lane not in n.axes]
    return sum(SCALAR_OPS[n.name].cost for n in shared) >= tuning.kept_cost


def _tiles_of_rows(kernel: FlatKernel, lane: Axis, machine: Machine) -> tuple[Binding, ...]:
    """Return bindings for tiles of whole rows, of which the lanes are the elements."""
    *others, rows, _ = kernel.grid
    width = max(machine.vector, power_of_two(lane.extent.const))
    tile = Binding(rows, LoopKind.GRID, machine.loops.row_tile)
    points = (Binding(axis, LoopKind.GRID) for axis in others)
    return (*points, tile, Binding(lane, LoopKind.LANES, width))


def _scans_rows(kernel: Kernel, lane: Axis, inside: list[Axis], machine: Machine) -> bool:
    """Return True for scans along the only loops, each of whose steps has many columns.

    A step then reads neighbouring elements, and keeps what it has so far of them in an array.
    """
    scans = [n for n in kernel_nodes(kernel) if isinstance(n, Scan)]
    if lane in kernel.inside or lane.extent.hint() < machine.loops.least_scanned:
        return False
    along = {axis for n in scans for axis in n.over}
    return bool(scans) and set(inside) == along and all(lane in n.axes for n in scans)


def _transposed(
    kernel: Kernel, lane: Axis, transposed: Axis, machine: Machine
) -> tuple[Binding, ...]:
    """Return bindings for loads that are contiguous along ``transposed``, and lanes along ``lane``.

    Blocks of a pointwise kernel advance along the contiguous axis of the loads: 1.5 times as fast
    as the other order (2026-11). Reduced loops run inside the loop over lanes, so that accumulators
    stay in a register.
    """
    width = machine.vector
    others = [a for a in kernel.grid if a is not lane and a is not transposed]
    bindings = [Binding(a, LoopKind.GRID) for a in others]
    if transposed in kernel.grid:
        own = Binding(lane, LoopKind.GRID, width, 1)
        return (*bindings, own, Binding(transposed, LoopKind.GRID, 1, width, transposed=True))
    blocks = Binding(transposed, LoopKind.LOOP, 1, width, transposed=True)
    nest = nest_order(kernel, lane, machine) or ()
    own = _lanes(kernel, lane, machine, count(tuple(others)))
    loops = [blocks if a is transposed else Binding(a, LoopKind.LOOP) for a in nest]
    return (*bindings, own, *loops)


def _lanes(kernel: Kernel, lane: Axis, machine: Machine, outer: int) -> Binding:
    """Return the binding of the lane axis if the other grid axes have ``outer`` points."""
    tile = machine.vector if lane.extent.hint() >= machine.vector // 2 else 1
    tuning = machine.loops
    is_long = lane.extent.hint() > 16 * tuning.point_elements
    if lane in kernel.inside or (outer >= tuning.least_points and not is_long):
        block = tile * tuning.sum_tiles
        cut = _sums_many(kernel, lane, block) or _scans_dear(kernel, lane, block, tuning.kept_cost)
        return Binding(lane, LoopKind.LOOP, tile, tuning.sum_tiles if cut else 0)
    return Binding(lane, LoopKind.GRID, tile, _chunk(lane, tile, outer, tuning))


def lane_axis(kernel: FlatKernel, machine: Machine) -> Axis | None:
    """Return the fastest axis, of those that fill half a vector at least if any does.

    Where that fills no whole vector, one that does and is as fast (reads along one, stores along
    the other) comes before it: 512 x 512 filters of 3 x 3, transposed from channels last, take
    1.7 ms, 3.2 in lanes of nine (AVX-512, one thread, 2026-11). A window
    of 3 is contiguous in memory, but its outputs, even with strided loads, fill vectors
    (max_pool2d of relu, 3x3 and stride 2: 5 times faster, measured 2026-11).
    """
    axes, half = lane_candidates(kernel), machine.vector // 2
    lane = fastest_axis(kernel, axes)
    halves = offsets_with_neighbour(kernel)
    if halves:
        along = fastest_axis(kernel, axes, halves)
        if along is not None and nest_order(kernel, along, machine) is not None:
            lane = along
    if lane is None or lane.extent.hint() >= machine.vector:
        return lane
    is_short = lane.extent.hint() < half
    wanted = half if is_short else machine.vector
    long = tuple(a for a in axes if a.extent.hint() >= wanted)
    # Of equally fast axes it is the last one.
    other = fastest_axis(kernel, long if is_short else (lane, *long), halves)
    if other is None or nest_order(kernel, other, machine) is None:
        return lane
    return other


def lane_candidates(kernel: Kernel) -> tuple[Axis, ...]:
    """Return the axes that may be lanes: not those of a scatter's sources, or places, or results.

    Nor an axis along which steps are taken one by one.
    """
    serial: set[Axis] = set()
    for node in kernel_nodes(kernel):
        if isinstance(node, Scan | Reduce) and _takes_steps(node):
            serial.update(node.over)
        elif isinstance(node, Reduce) and (hits := hits_of(node)):
            serial.update(node.over, *((hit.axis, *hit.place.axes) for hit in hits))
    return tuple(a for a in kernel.axes if a not in serial)


def _takes_steps(node: Scan | Reduce) -> bool:
    """Return True if the points that are combined may not be lanes.

    In lanes a recurrence would multiply factors, and exponentials of f64 are scalar.
    """
    if isinstance(node, Reduce) or node.monoid.ordered:
        return node.monoid.ordered
    wide = node.monoid is EXPSUM and node.bodies[0].dtype is not F32
    return wide or node.monoid in (ARGMAX, ARGMIN)


def transposed_axes(kernel: Kernel, machine: Machine) -> tuple[Axis, Axis] | None:
    """Return the axis along which stores are contiguous, and another along which loads are.

    None unless both fill vectors, and a store varies along both. In a kernel
    with reductions the second axis is a loop, and all loads must be transposed, or contiguous or
    constant along the first. Measured on one core (AVX-512, 2026-11): 512x512 matrices are copied 4
    to 7 times as fast as element by element, 1.9 to 3.5 times as fast as in eager.
    """
    if any(
        isinstance(n, Scan) or (isinstance(n, Reduce) and hits_of(n)) for n in kernel_nodes(kernel)
    ):
        return None
    long = [a for a in kernel.axes if a.limit is None and a.extent.hint() >= machine.vector]
    offsets = [(s.buffer.offset(s.indices), s.buffer.dtype.itemsize) for s in kernel.stores]
    written: dict[Axis, int] = {}
    for axis in long:
        walked = sum(size for at, size in offsets if at.steps_by_one(axis))
        if walked and axis in kernel.grid:
            written[axis] = walked
    if not written:
        return None
    lane = max(written, key=written.__getitem__)
    found = kernel.loads
    read: dict[Axis, int] = {}
    for axis in long:
        transposed = [n for n in found if is_transposed(n, axis, lane)]
        whole = any(axis in at.axes and at.steps_by_one(lane) for at, _ in offsets)
        if transposed and whole and (not kernel.inside or axis in kernel.inside):
            read[axis] = sum(n.buffer.dtype.itemsize for n in transposed)
    if not read:
        return None
    other = max(read, key=read.__getitem__)
    legal = not kernel.inside or (
        all(_transposes(load, lane, other) for load in found)
        and nest_order(kernel, lane, machine) is not None
    )
    return (lane, other) if legal else None


def _transposes(load: Load, lane: Axis, other: Axis) -> bool:
    """Return True if a load has stride 0 or 1 along ``lane``, or can be transposed."""
    step = load.buffer.offset(load.indices).coefficient(lane)
    return step in (index(0), index(1)) or is_transposed(load, other, lane)


def accepts_loops(kernel: Kernel, machine: Machine) -> bool:
    """Return True if there is one loop order that is legal for all reductions of the kernel."""
    if serial_reductions(kernel):  # planning sees merged axes, which may be too long for an array
        kernel = run_scans(coalesce(kernel))
        if any(map(scan_of, kernel.reductions)):
            return False  # some run forwards, others backwards
    lane = fastest_axis(kernel, lane_candidates(kernel))
    return nest_order(kernel, lane, machine) is not None


def _sums_many(kernel: Kernel, lane: Axis, block: int) -> bool:
    """Return True if a float sum over the lane axis has at least two blocks of elements."""
    if lane.limit is not None or lane.extent.hint() < 2 * block:
        return False
    sums = (n for n in kernel.reductions if n.monoid is SUM and n.dtype.is_float)
    return any(lane in n.over for n in sums)


def _scans_dear(kernel: Kernel, lane: Axis, block: int, least: int) -> bool:
    """Return True for expensive terms of a scan along lanes of at least two blocks of elements.

    Those of a block are computed before its scan, and stay in a core's first cache.
    """
    scans = (n for n in kernel_nodes(kernel) if isinstance(n, Scan) and lane in n.over)
    terms = postorder(term for scan in scans for term in scan.bodies)
    cost = sum(SCALAR_OPS[n.name].cost for n in terms if isinstance(n, Op))
    return lane.extent.hint() >= 2 * block and cost >= least


def _is_window(inside: list[Axis], most: int) -> bool:
    """Return True for loops with few iterations, known statically: a window."""
    points = product(a.extent for a in inside)
    return bool(inside) and points.is_constant and points.const <= most


def _chunk(lane: Axis, tile: int, outer: int, tuning: LoopTuning) -> int:
    """Return the tiles of a grid point: as many as fit the cache, or fewer for enough points."""
    tiles = -(-lane.extent.hint() // tile)
    wanted = max(1, tuning.least_points // max(outer, 1))
    chunk = max(1, min(tuning.point_elements // tile, -(-tiles // wanted)))
    if lane.extent.is_constant:
        # A divisor of the number of tiles saves the loop's second bound.
        exact = [c for c in range(max(1, chunk // 2), chunk + 1) if tiles % c == 0]
        chunk = exact[-1] if exact else chunk
    return chunk
