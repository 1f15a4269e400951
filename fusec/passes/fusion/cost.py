"""Cost model of a kernel: bytes over bandwidth, operations over rate, and a launch.

It only ranks candidates; measurements override it. The rates are in ``ir/machine.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from fusec.ir.contraction import factors, is_window
from fusec.ir.dtype import DType
from fusec.ir.expr import (
    Buffer,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    loads,
    postorder,
    reductions,
)
from fusec.ir.graph import Extern, Kernel, View, kernel_nodes
from fusec.ir.groups import pairs_of, rows_of_a_group, visited
from fusec.ir.index import Axis, index
from fusec.ir.machine import Machine
from fusec.ir.scalar import SCALAR_OPS
from fusec.ir.serial import scan_of, serial_axes, serial_reductions, shared_axes
from fusec.passes.fusion.footprint import kernel_traffic
from fusec.passes.fusion.sweeps import sweeps_again
from fusec.passes.kernel.unroll_rows import unrolls_rows
from fusec.passes.schedule.access import count, fastest_axis
from fusec.passes.schedule.contraction import ProcessorShare, spread
from fusec.passes.schedule.rowwise import holds_parts

ONE_TILE: Mapping[Axis, int] = MappingProxyType({})
"""No tiled axes: no operand is computed more than once."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Traffic (bytes), arithmetic (multiply-adds) and modelled time (us) of one kernel.

    Attributes:
        spread: how a kernel with products occupies the machine; its loop is split where the model
            prefers that.
    """

    bytes: int
    operations: int
    us: float
    spread: ProcessorShare | None = None


def numel(window: Buffer | View) -> int:
    """Return the number of distinct elements of a buffer or view: expanded axes count once."""
    pairs, zero = zip(window.shape, window.strides, strict=True), index(0)
    return math.prod([extent.hint() for extent, stride in pairs if stride is not zero])


def buffer_bytes(buffer: Buffer) -> int:
    """Return the bytes of a buffer's elements, at the hints of sizes."""
    return numel(buffer) * buffer.dtype.itemsize


def moved_bytes(kernel: Kernel, machine: Machine) -> int:
    """Return the bytes that a kernel reads and writes: what no cache keeps, in each sweep."""
    again, traffic = sweeps_again(kernel, machine), kernel_traffic(kernel)
    return sum(r * (1 + again.get(b, 0)) + w for b, (r, w) in traffic.items())


def kernel_operations(kernel: Kernel, along: Mapping[Axis, int] = ONE_TILE) -> int:
    """Return modelled multiply-adds: each node once for each iteration of its free axes.

    Matrix products are left out: ``kernel_products`` counts them.

    Args:
        along: axis -> tiles along it, each of which recomputes the values that do not vary along
            it: an operand of a product, for each tile of columns.
    """
    total = 0
    nodes = kernel_nodes(kernel)
    products = {n for n in nodes if factors(n) is not None}
    bodies = {b for n in products if isinstance(n, Reduce) for b in n.bodies}
    places: dict[Expr, frozenset[Axis]] = {}
    for reduction in serial_reductions(kernel):  # a scan of a scan takes steps along both axes
        own = serial_axes((reduction,))
        places.update((n, places.get(n, own) | own) for n in postorder(reduction.bodies))
    pairs = pairs_of(nodes)
    for node in nodes:
        if node in products or node in bodies:
            continue
        axes = visited(node.axes - places.get(node, frozenset()), pairs)
        again = math.prod(n for axis, n in along.items() if axis not in node.axes)
        match node:
            case Op():
                total += SCALAR_OPS[node.name].cost * count(axes) * again
            case Reduce():
                axes = visited(axes | frozenset(node.over), pairs) - serial_axes((node,))
                total += len(node.bodies) * count(axes) * again
            case Select() | IndexValue() | Load():
                total += count(axes)
    return total


def gathered_operations(kernel: Kernel, machine: Machine) -> int:
    """Return the multiply-adds that loads of sums over windows take where they gather, on a CPU.

    A window's loops read all of its operands at each point. One that lies apart along the lanes is
    gathered element by element, which takes half as long as a vector's multiply-add for each.
    """
    windows = [n for n in kernel.reductions if is_window(n)]
    wide = tuple(a for a in kernel.axes if a.extent.hint() >= machine.vector // 2)
    lane = fastest_axis(kernel, wide) if windows and machine.vector > 1 else None
    if lane is None:
        return 0
    total = 0
    for node in windows:
        steps = (x.buffer.offset(x.indices).coefficient(lane) for x in loads(node.bodies))
        apart = sum(step not in (index(0), index(1)) for step in steps)
        total += apart * count(node.axes | frozenset(node.over)) * machine.vector // 2
    return total


def multiplied(nodes: Iterable[Expr]) -> Counter[DType]:
    """Return the multiply-adds of the matrix products among nodes, by the operands' type."""
    found: Counter[DType] = Counter()
    nodes = tuple(nodes)
    pairs = pairs_of(nodes)
    for node in nodes:
        if isinstance(node, Reduce) and (parts := factors(node)) is not None:
            found[parts.left.dtype] += count(visited(node.axes | frozenset(node.over), pairs))
    return found


def kernel_products(kernel: Kernel, machine: Machine) -> float:
    """Return the multiply-adds of matrix products, in equivalents of the library's 16-bit ones."""
    slow = dict.fromkeys(machine.widened, machine.slow_widened)
    return _weighted(kernel_nodes(kernel), {**slow, **machine.product_times})


def _weighted(nodes: Iterable[Expr], times: Mapping[DType, float]) -> float:
    return float(sum(n * times.get(dtype, 1) for dtype, n in multiplied(nodes).items()))


def kernel_cost(kernel: Kernel, machine: Machine) -> Cost:
    """Return the modelled cost; a grid too small for the machine gets a fraction of its rates.

    If splitting the loop (``split_loop``) is faster, the time is that of both kernels.
    """
    moved = moved_bytes(kernel, machine)
    streams = unrolls_rows(kernel, machine)
    found = spread(kernel, machine) if machine.multiplies and not streams else None
    operations = kernel_operations(kernel, found.along if found else ONE_TILE)
    operations += gathered_operations(kernel, machine)
    work = max(moved / machine.bytes_per_us, operations / machine.operations_per_us)
    if streams:
        sums = kernel.reductions
        points = sum(count(n.axes | frozenset(n.over)) for n in sums)
        work = max(work, points / machine.operations_per_us)
    elif machine.multiplies and (products := kernel_products(kernel, machine)):
        products_us = products / machine.products_per_us * (found.passes if found else 1.0)
        if _nests_products(kernel):
            products_us /= machine.rates.nested
        elif found is not None and found.roles:  # one group multiplies, then computes the rest
            rate = machine.rates.narrow_roles if found.narrow else machine.rates.roles
            products_us = products_us / rate + operations / machine.operations_per_us
        else:
            products_us /= machine.rates.tiled
        # A core's vector units do both; tensor cores overlap with the rest.
        work = work + products_us if machine.is_cpu else max(work, products_us)
    if found is None:
        busy = min(1.0, max(programs(kernel, machine), 1) / machine.units)
        us = max(work / busy, _waiting_us(kernel, machine))
        return Cost(moved, operations, us + machine.launch_us)
    us = work / found.busy(machine.units) + machine.launch_us + _added_us(kernel, found, machine)
    if found.axis is not None:
        busy = found.busy(machine.units, found.parts)
        split = work / busy + 2 * machine.launch_us + _parts_us(kernel, found, machine)
        found = found if split < us else replace(found, axis=None, parts=1)
        us = min(us, split)
    return Cost(moved, operations, us, found)


def _added_us(kernel: Kernel, found: ProcessorShare, machine: Machine) -> float:
    """Return the time to write zeros, to which programs add, and to read the sums.

    Another kernel reads them where the loops have been split.
    """
    if not found.added:
        return 0.0
    passes, launches = (1, 1) if any(s.adds for s in kernel.stores) else (3, 2)
    return passes * found.added / machine.bytes_per_us + launches * machine.launch_us


def _parts_us(kernel: Kernel, found: ProcessorShare, machine: Machine) -> float:
    """Return the time to store and load the partial results of a split loop."""
    sums = [n for n in kernel.reductions if found.axis in n.over]
    size = sum(count(n.axes) * n.dtype.itemsize for n in sums) * found.parts
    return 2 * size / machine.bytes_per_us


def _waiting_us(kernel: Kernel, machine: Machine) -> float:
    """Return how long loops on a GPU wait for the sum of each iteration, which they add up.

    So it is where squares are summed about the means of parts, and one kernel has the parts and
    their sum. A sum of plain sums waits at its end alone. Column sums beside sums of rows are left
    out: a loop loads their rows ahead, several in an iteration.
    """
    if machine.is_cpu:
        return 0.0
    sums = [n for n in kernel_nodes(kernel) if isinstance(n, Reduce)]
    steps = sum(_steps(kernel, one, machine) for one in sums)
    turns = programs(kernel, machine) / (machine.rows.concurrent * machine.units)
    return steps * machine.rows.step_us * max(1.0, turns)


def _steps(kernel: Kernel, outer: Reduce, machine: Machine) -> int:
    """Return the iterations of a loop over the parts of a row, which adds up a number of each.

    0 where registers hold the whole row: all parts are lanes. An iteration has several short parts
    if that loop is the kernel's only one.
    """
    over, parts, tuning = set(outer.over), count(outer.over), machine.rows
    for inner in postorder(outer.bodies):
        if not isinstance(inner, Reduce) or inner in outer.bodies:
            continue
        if over.isdisjoint(inner.axes) or not outer.axes.isdisjoint(inner.over):
            continue
        read = {x.buffer for x in loads(inner.bodies) if x.axes & over and x.axes & {*inner.over}}
        row, sizes = count(inner.over), [b.dtype.itemsize for b in read]
        alone = over.union(inner.over).issuperset(kernel.inside)
        height = max(1, tuning.loop_elements // row) if alone else 1
        if parts > height and not holds_parts(parts, row, sizes, tuning):
            return -(-parts // height)
    return 0


def _nests_products(kernel: Kernel) -> bool:
    """Return True if an operand of a matrix product contains another matrix product."""
    products = [n for n in kernel_nodes(kernel) if factors(n) is not None]
    return any(
        inner is not outer and factors(inner) is not None
        for outer in products
        for inner in postorder((outer,))
    )


def call_cost(call: Extern, machine: Machine) -> Cost:
    """Return the modelled cost of a library call, by the products in its decomposition."""
    moved = sum(map(buffer_bytes, (*call.writes, *call.reads)))
    times = machine.product_times
    lines = call.decomposition
    products = [p for line in lines if (p := _weighted(postorder((line.expr,)), times))]
    rates, rate = machine.rates, machine.products_per_us
    if len(products) > 1:
        biased = len(products) == 2 and _is_biased(call)
        rate *= rates.library_biased if biased else rates.library_nested
    products_us = sum(products) / rate if machine.multiplies else 0.0
    groups = pairs_of(postorder(line.expr for line in lines))
    products_us *= _passes(groups, machine.tiles.library_side)
    # A core stalls on the loads and stores of scores; a GPU overlaps them with products.
    copied = moved / machine.bytes_per_us
    work = copied + products_us if machine.is_cpu else max(copied, products_us)
    launches = 2 if _is_split(call, machine) or groups else 1  # one prepares pointers to groups
    return Cost(moved, 0, work + launches * machine.launch_us)


def _passes(groups: Mapping[Axis, frozenset[Axis]], side: int) -> float:
    """Return the rows that a library's tiles have, as a multiple of those that exist.

    The last tile of each group has half of its rows, on average.
    """
    rows = rows_of_a_group(groups).values()
    return max((1 + side / 2 / each for each in rows), default=1.0)


def _is_biased(call: Extern) -> bool:
    """Return True if an attention reads a tensor as wide as its scores, which are internal."""
    made = {line.buffer for line in call.decomposition}
    return any(
        isinstance(node, Load) and node.axes.issuperset(line.axes[-2:]) and node.buffer not in made
        for line in call.decomposition
        if line.buffer not in call.writes
        for node in postorder((line.expr,))
    )


def _is_split(call: Extern, machine: Machine) -> bool:
    """Return True if the library would split a product's loop (split-K): few tiles, many terms."""
    sums = [n for line in call.decomposition for n in reductions(line.expr)]
    terms = max((count(n.over) for n in sums), default=0)
    result = next(iter(call.outputs), None)  # a call in place has none
    if terms < machine.tiles.library_terms or result is None or len(result.shape) < 2:
        return False
    *batch, rows, columns = (extent.hint() for extent in result.shape)
    side = machine.tiles.library_side
    tiles = math.prod(batch) * -(-rows // side) * -(-columns // side)
    return tiles < machine.units // 2


def programs(kernel: Kernel, machine: Machine) -> int:
    """Return the number of programs: grid points, in tiles along the fastest axis."""
    fast = fastest_axis(kernel, kernel.axes) if kernel.inside else None
    points = count(tuple(a for a in kernel.grid if a is not fast))
    points *= count(shared_axes(kernel))
    if fast is not None and fast in kernel.grid:
        # A scan's loop is inside that over lanes, which is cut where there are few other points.
        scans = any(map(scan_of, serial_reductions(kernel)))
        points *= -(-fast.extent.hint() // (machine.vector if scans else machine.tile))
    return points
