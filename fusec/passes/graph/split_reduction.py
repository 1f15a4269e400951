"""Split a reduction over many rows into partial sums in parallel and one small final sum.

Spec: ``graph -> graph``. ``w[c] = sum(m: f[m, c])`` becomes ``p[b, c] = sum(i: f[b*R + i, c])`` and
``w[c] = sum(b: p[b, c])``. Then no large reduction prevents its neighbours from having rows on the
grid: dx and dgamma of a LayerNorm share one kernel. Deterministic: the number of parts depends on
the shapes and the target, never on the number of threads.

Partial sums are written and read again. On a GPU they may take one percent of the bytes that are
summed, where that allows two programs for each multiprocessor, and more for rows of which several
programs share one: three of rows that a warp holds with lanes to spare; else there is one for each.
Sums of one shape in a graph have the same number of parts, so that they unify; their bytes count
together. Column sums that read no number of a row, as a mean, share no kernel with rows: their
tiles of columns are programs, too. Their parts are equal, for one that ends within a tile of rows
masks all its loads (53 us for 25: 8192 x 6400, H200, 2026-11-27). So are those of rows, which are
whole images where these are programs enough. A sum of squared deviations is split about the means
of the parts (``squares.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fusec.ir.combine import AxisSplit
from fusec.ir.contraction import factors, is_product
from fusec.ir.expr import Buffer, Load, Op, Reduce, loads, reach, reductions
from fusec.ir.graph import Def, Graph
from fusec.ir.index import Axis, Index, floordiv, index
from fusec.ir.machine import Machine
from fusec.ir.monoid import MAX
from fusec.ir.serial import serial_axes
from fusec.ir.streamed import conversions, copies_from_tables, match_skinny, reading_weights
from fusec.ir.strides import begin_aligned
from fusec.passes.fusion.cost import buffer_bytes, numel
from fusec.passes.fusion.sweeps import held_bytes
from fusec.passes.graph.rfactor import Splitter, split_axes
from fusec.passes.graph.simplify import simplifier
from fusec.passes.graph.squares import median_of_three
from fusec.passes.schedule.access import count


def split_reduction(graph: Graph, machine: Machine) -> Graph:
    """Return the graph with large column and full reductions split into partial and final ones.

    Reductions that one kernel may compute in a loop of products stay (``_softmax_weighted``).
    """
    whole = _softmax_weighted(graph) if machine.multiplies else frozenset()
    lines = [line for line in graph.defs if line.buffer not in whole]
    sums = {line: reductions(line.expr) for line in lines}
    made = {line.buffer: line for line in graph.defs}
    found = {
        line: own[0]
        for line, own in sums.items()
        if len(own) == 1 and _worth_splitting(line, own[0], made, machine)
    }
    found = {line: found[line] for line in _without_streams(graph, found, machine)}
    parts = _count_parts(made, found, machine)
    cuts = {
        line: cut
        for line, reduction in found.items()
        if (cut := _cut(reduction, *parts[line])) is not None
    }
    return graph.map_defs(Splitter(cuts, median_of_three, fastest=False).split)


def _without_streams(graph: Graph, lines: Collection[Def], machine: Machine) -> Collection[Def]:
    """Return the lines that are no product of one row with weights that are narrow or chosen."""
    if not lines:
        return lines
    simplify = simplifier()
    known = conversions(graph, simplify) | copies_from_tables(graph) if machine.skinny_rows else {}

    def streams(line: Def) -> bool:
        sums = reductions(reading_weights(line, known, simplify).expr)
        found = (match_skinny(n, 1) for n in sums)
        return any(p is not None and (p.narrow or p.batch) for p in found)

    return [line for line in lines if known.keys().isdisjoint(line.reads) or not streams(line)]


def _count_parts(
    made: Mapping[Buffer, Def], found: dict[Def, Reduce], machine: Machine
) -> dict[Def, tuple[int, int, int]]:
    """Return line -> ``wanted``, ``loss`` and ``enough`` for ``_cut``, the same for one shape."""
    tuning = machine.fusion
    alike: dict[object, list[Def]] = {}
    for line, reduction in found.items():
        extents = (tuple(a.extent for a in axes) for axes in (reduction.over, line.axes))
        alike.setdefault((*extents, _contiguous_axis_is_kept(reduction)), []).append(line)
    parts: dict[Def, tuple[int, int, int]] = {}
    for lines in alike.values():
        rows = count(found[lines[0]].over)
        width = count(lines[0].axes)
        sources = _sources(lines, made)
        summed = _bytes_along(sources, rows * width)
        part = sum(count(line.axes) * found[line].dtype.itemsize for line in lines)
        allowed = int(machine.part_share * summed) // (2 * part)
        columns = _contiguous_axis_is_kept(found[lines[0]])
        loss = tuning.lost_parts[width >= machine.rows.loop_elements]
        # Where the contiguous axis is summed as well, lanes share a part and its chains are short.
        wanted = max(machine.parts, rows // tuning.most_part_rows if columns else 1)
        if columns and not machine.is_cpu and rows not in map(numel, sources):
            programs = 6 * machine.parts  # twelve for each multiprocessor
            number, loss = programs // -(-width // machine.tile), 1
            number = min(number, rows // machine.rows.column_rows)
        elif allowed >= machine.parts:
            number = min(wanted, allowed)
        elif (
            tuning.two_programs * allowed >= machine.parts
            and width < 2 * machine.rows.loop_elements
        ):
            number = machine.parts + machine.units * (width < machine.rows.warp_row)
        else:
            number = machine.units
        number = max(1, min(number, rows // tuning.least_part_rows))
        enough = number
        if not (columns or machine.is_cpu):
            enough, loss = _enough_rows(rows, width, machine), 1
        parts.update(dict.fromkeys(lines, (number, loss, enough)))
    return parts


def _enough_rows(rows: int, width: int, machine: Machine) -> int:
    """Return from how many parts on their rows are short, and their programs many, on a GPU.

    A channel's sum has a part for each image then. Half of one were a shorter row, and unlike the
    rows of what stands behind the sum: one kernel of both would take it element by element.
    """
    return max(-(-rows // machine.rows.resident_row), -(-machine.parts // width))


def _bytes_along(sources: Collection[Buffer], elements: int) -> int:
    """Return the bytes of the sources that have at least half of so many elements."""
    return sum(buffer_bytes(b) for b in sources if 2 * numel(b) >= elements)


def _sources(lines: Collection[Def], made: Mapping[Buffer, Def]) -> set[Buffer]:
    """Return the buffers, made by no definition, from which lines are computed, transitively."""
    read = [buffer for line in lines for buffer in line.reads]
    sources = reach(read, lambda b: made[b].reads if b in made else ())
    return {b for b in sources if b not in made}


def _worth_splitting(
    line: Def, reduction: Reduce, made: Mapping[Buffer, Def], machine: Machine
) -> bool:
    """Return True if the only reduction of a line is worth two kernels."""
    rows, kept = count(reduction.over), count(line.axes)
    if (
        factors(reduction) is not None  # a product of matrices has schedules of its own
        or serial_axes((reduction,))
        or rows * kept < machine.fusion.split_elements
        or rows < 2 * machine.fusion.least_part_rows
        or reduction.axes - set(line.axes)
    ):
        return False
    # Windows read an element several times.
    read = min(rows * kept, max((numel(x.buffer) for x in loads(reduction.bodies)), default=0))
    if kept * 4 > read:  # the partial buffer would rival the input
        return False
    if _contiguous_axis_is_kept(reduction):
        # Short columns (pooling windows, say) stay whole if there are enough to fill the machine.
        return rows > machine.fusion.most_part_rows or kept < machine.units * machine.tile
    # A row that one program reads in less time than two more kernels take stays whole.
    row_us = rows * reduction.dtype.itemsize * machine.units / machine.bytes_per_us
    few, long_us = machine.units // 2, 2 * machine.launch_us
    if not machine.is_cpu and _is_odd(reduction, machine):  # its program loads them one by one
        few, long_us = machine.parts, machine.launch_us / 2
    long = kept < few and row_us > long_us
    return long or not (len(reduction.over) == 1 or _stays(line, rows, made, machine))


def _is_odd(reduction: Reduce, machine: Machine) -> bool:
    """Return True for long images, of which not all begin at multiples of 8 bytes."""
    image = count(reduction.over[1:])
    odd = not begin_aligned(image, (x.dtype.itemsize for x in loads(reduction.bodies)))
    return odd and 2 * image >= machine.rows.loop_row


def _stays(line: Def, rows: int, made: Mapping[Buffer, Def], machine: Machine) -> bool:
    """Return True if what all programs sweep over stays in a GPU's cache for the next sweep.

    A mean is swept over again by what needs it: squared deviations, normalised values. A line may
    read what another computes from a narrower tensor, or from several: these are swept over.
    """
    kept = count(line.axes)
    held = held_bytes(_bytes_along(_sources([line], made), rows * kept) // kept, kept, machine)
    return machine.is_cpu or held <= machine.rows.kept_bytes


def _contiguous_axis_is_kept(reduction: Reduce) -> bool:
    """Return True for a column reduction: the largest load runs fastest along a kept axis."""
    largest: Load | None = None
    for load in loads(reduction.bodies):
        if largest is None or count(load.axes) > count(largest.axes):
            largest = load
    if largest is None:
        return False
    offset = largest.buffer.offset(largest.indices)
    steps = {a: offset.coefficient(a) for a in offset.axes}
    fastest = min(
        (a for a, k in steps.items() if k is not None and k.hint() > 0),
        key=lambda a: (steps[a] or index(0)).hint(),
        default=None,
    )
    return fastest is not None and fastest not in reduction.over


def _cut(reduction: Reduce, wanted: int, loss: int, enough: int) -> AxisSplit | None:
    """Split the outermost reduced axes into about ``wanted`` parts, or return None.

    Args:
        loss: one of so many parts may be given up to make all equally long.
        enough: parts after which no further axis is cut.
    """
    counts: list[tuple[Axis, Index, Index]] = []  # reduced axis, parts of it, rows in a part
    made = 1
    for axis in reduction.over:
        extent = axis.extent.hint()
        if made >= max(enough, 2):
            wanted = 1
        if wanted > 1 and extent <= wanted:
            counts.append((axis, axis.extent, index(1)))
            wanted //= max(extent, 1)
            made *= extent
        elif wanted > 1:
            counts.append((axis, *_cut_extent(axis.extent, wanted, loss)))
            wanted = 1
        else:
            counts.append((axis, index(1), axis.extent))
    cut = split_axes(counts)
    return cut if cut.inner and cut.part.extent is not index(1) else None


def _cut_extent(extent: Index, parts: int, loss: int) -> tuple[Index, Index]:
    """Return (parts, rows a part): equal parts if a divisor is near, else the last one is short.

    A divisor costs at most one of ``loss`` parts: each may keep a multiprocessor busy.
    """
    rows = floordiv(extent + (parts - 1), index(parts))
    if not extent.is_constant:
        return index(parts), rows
    exact = [
        r for r in range(rows.const, rows.const * (loss + 1) // loss + 1) if extent.const % r == 0
    ]
    rows = index(exact[0]) if exact else rows
    return index(-(-extent.const // rows.const)), rows


# -- what stays whole ------------------------------------------------------------------------------


def _softmax_weighted(graph: Graph) -> frozenset[Buffer]:
    """Return the reductions of softmaxes over products, and the sums that they weight.

    Split one by one, the maximum of the scores, the sum of their exponentials and the weighted sum
    of the values would each read the scores again; fused into one kernel they are split together,
    by ``split_loop``. Of these m, l and y stay whole::

        s[n] = sum(d: q[d] * k[n, d]);  m = max(n: s[n]);  w[n] = exp(s[n] - m)
        l = sum(n: w[n]);  y[d] = sum(n: w[n]/l * v[n, d])
    """
    scores: set[Buffer] = set()
    tops: set[Buffer] = set()
    weights: set[Buffer] = set()
    beside: set[Buffer] = set()
    found: set[Buffer] = set()
    lines = {line.buffer: line for line in graph.defs}
    for line in lines.values():
        sources = set(line.reads)
        sums = reductions(line.expr)
        if any(_weights_alone(n, weights) for n in sums):
            found.add(line.buffer)
        if any(n.monoid is MAX for n in sums) and sources & scores:
            tops.add(line.buffer)
        elif sums and sources & weights:
            beside.add(line.buffer)
        elif any(map(is_product, sums)) or (sources & scores and not sums):
            scores.add(line.buffer)
        if not sums and sources & (tops | weights):
            weights.add(line.buffer)
    above = reach(found, lambda b: [s for s in lines[b].reads if s in lines])
    return frozenset(found | (tops | beside).intersection(above))


def _weights_alone(node: Reduce, weights: set[Buffer]) -> bool:
    """Return True for a product of which exactly one factor loads softmax weights."""
    if not is_product(node) or not isinstance(node.body, Op):
        return False
    a, b = (weights.isdisjoint(x.buffer for x in loads((f,))) for f in node.body.args)
    return a is not b
