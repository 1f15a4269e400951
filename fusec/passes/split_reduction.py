"""Split a reduction over many rows into partial sums in parallel and one small final sum.

Spec: ``graph -> graph``. ``w[c] = sum(m: f[m, c])`` becomes ``p[b, c] = sum(i: f[b*R + i, c])`` and
``w[c] = sum(b: p[b, c])``. After it no large reduction hinders its neighbours from keeping rows in
the grid: dx and dgamma of a LayerNorm share one kernel. Deterministic: the number of parts depends
on the shapes and the target, never on the number of threads.

Partial sums are written and read again. On a GPU they may take one percent of what is summed, where
that leaves two programs for each multiprocessor; else there is one for each. Sums of one shape in a
graph have the same number of parts, so that they unify, and count together. A sum of squares about
a mean is put together of parts about their own means (``squares.py``): it waits for no mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.errors import InvalidIR
from fusec.ir.combine import rfactor
from fusec.ir.contraction import factors
from fusec.ir.expr import Buffer, Expr, Load, Reduce, loads, reach, reductions
from fusec.ir.graph import Def, Graph
from fusec.ir.index import Axis, Index, contiguous_strides, floordiv, index, product
from fusec.ir.monoid import MONOIDS
from fusec.ir.rewrite import rewrite
from fusec.passes.cost import count, numel
from fusec.passes.machine import Machine
from fusec.passes.squares import Part, count_rows, find_squares, joined
from fusec.passes.weighted_sums import softmax_weighted

TWICE = 4
"""How many times the share of what is summed partial sums may take, to give each multiprocessor two
programs that fit it: one alone waits at barriers for each row (RMSNorm of 4096, sm_90, by
analysis)."""
LOSS, LONG_LOSS = 8, 64
"""Of how many parts one may go, so that all are as long; fewer where rows are long: 128 programs
leave four of 132 multiprocessors idle."""
LONG_ROW = 4096
"""Elements of a row that fill an iteration of a loop over rows; two programs of longer ones take
more registers than there are."""


@dataclass(frozen=True, slots=True)
class _Split:
    """The cut of a reduction: ``part`` counts the parts, ``inner`` axes run inside one.

    Attributes:
        value: reduced axis -> index over ``part`` and ``inner``.
    """

    part: Axis
    inner: tuple[Axis, ...]
    value: dict[Axis, Index]


def split_reduction(graph: Graph, machine: Machine) -> Graph:
    """Return the graph with large column and full reductions split into partial and final ones.

    Not those that one kernel may compute in the loop of its products (``weighted_sums.py``).

    Raises:
        InvalidIR: if a reduction's monoid is not in the table of associative ones.
    """
    whole = softmax_weighted(graph) if machine.multiplies else frozenset()
    lines = [line for line in graph.defs if line.buffer not in whole]
    found = {line: n for line in lines if (n := _to_split(line, machine)) is not None}
    parts = _count_parts(graph, found, machine)
    return graph.map_defs(_Splitter(found, parts).split)


def _to_split(line: Def, machine: Machine) -> Reduce | None:
    """Return the reduction of a line, if it has one alone and that is worth two kernels."""
    (reduction, *others) = reductions(line.expr) or (None,)
    if reduction is None or others or not _worth_splitting(line, reduction, machine):
        return None
    if reduction.monoid.name not in MONOIDS:
        raise InvalidIR(f"{reduction.monoid} is not associative", stage="split_reduction")
    return reduction


def _count_parts(graph: Graph, found: dict[Def, Reduce], machine: Machine) -> dict[Def, int]:
    """Return how many parts each line is cut into, the same for all of one shape."""
    made = {line.buffer: line for line in graph.defs}
    alike: dict[object, list[Def]] = {}
    for line, reduction in found.items():
        extents = (tuple(a.extent for a in axes) for axes in (reduction.over, line.axes))
        alike.setdefault((*extents, _contiguous_axis_is_kept(reduction)), []).append(line)
    parts: dict[Def, int] = {}
    for lines in alike.values():
        rows = count(found[lines[0]].over)
        large = rows * count(lines[0].axes) // 2
        sources = {b for line in lines for b in _sources(line, made) if numel(b) >= large}
        summed = sum(numel(b) * b.dtype.itemsize for b in sources)
        part = sum(count(line.axes) * found[line].dtype.itemsize for line in lines)
        allowed = int(machine.part_share * summed) // (2 * part)
        columns = _contiguous_axis_is_kept(found[lines[0]])
        warp_row = machine.tuning.warp_row
        # Where the contiguous axis is summed as well, lanes share a part and its chains are short.
        wanted = max(machine.parts, rows // machine.tuning.most_part_rows if columns else 1)
        if allowed >= machine.parts:
            number = min(wanted, allowed)
        elif TWICE * allowed >= machine.parts and warp_row < count(lines[0].axes) <= LONG_ROW:
            number = machine.parts
        else:
            number = machine.units
        parts.update(
            dict.fromkeys(lines, max(1, min(number, rows // machine.tuning.least_part_rows)))
        )
    return parts


def _sources(line: Def, made: dict[Buffer, Def]) -> set[Buffer]:
    """Return the buffers from outside that a line is computed from, through other lines."""
    sources = reach(line.reads, lambda b: made[b].reads if b in made else ())
    return {b for b in sources if b not in made}


class _Splitter:
    """Splits lines one after another.

    Args:
        found: line -> its reduction.
        parts: line -> how many parts that is cut into.
    """

    def __init__(self, found: dict[Def, Reduce], parts: dict[Def, int]) -> None:
        self.cuts = {
            line: cut
            for line, n in found.items()
            if (cut := _cut(n, parts[line], count(line.axes) >= LONG_ROW)) is not None
        }
        self.found = found
        self.squares = {
            line: one
            for line, one in find_squares({line: found[line] for line in self.cuts}).items()
            if parts[line] == parts[one.total]
        }
        self.totals = {one.total for one in self.squares.values()}
        self.partial: dict[Def, tuple[Buffer, ...]] = {}

    def split(self, line: Def) -> tuple[Def, ...]:
        """Return a line, or those of parts and of the whole in its place if it is cut."""
        return self._two(line) if line in self.cuts else (line,)

    def _two(self, line: Def) -> tuple[Def, ...]:
        cut, reduction = self.cuts[line], self.found[line]
        own = tuple(Axis(a.name, a.extent) for a in line.axes)
        shape = tuple(a.extent for a in (cut.part, *own))
        renamed = {a: index(b) for a, b in zip(line.axes, own, strict=True)}
        partial: list[Def] = []
        for found in self._parts(line, {**renamed, **cut.value}):
            name = f"{line.buffer.name}_part{len(partial) or ''}"
            part = Buffer(name, shape, contiguous_strides(shape), found.dtype)
            partial.append(Def(part, (cut.part, *own), found, line.origin))
        self.partial[line] = tuple(part.buffer for part in partial)
        last = Axis(cut.part.name, cut.part.extent)
        final = Reduce(reduction.monoid, (last,), *self._terms(line, last))
        (expr,) = rewrite((line.expr,), lambda node: final if node is reduction else node)
        return *partial, Def(line.buffer, line.axes, expr, line.origin)

    def _parts(self, line: Def, into: dict[Axis, Index]) -> tuple[Expr, ...]:
        """Return what a part of a line's reduction is, over the axes of the partial lines."""
        reduction, inner = self.found[line], self.cuts[line].inner
        one = self.squares.get(line)
        if one is not None:
            return (Part.of(one.value.substitute(into), inner).squares(),)
        if line in self.totals:
            return (Part.of(reduction.body.substitute(into), inner).total(),)
        return rfactor(reduction, into, inner)

    def _terms(self, line: Def, last: Axis) -> tuple[Expr, ...]:
        """Return what a part adds to the whole, over the line's axes and that of parts."""
        where = tuple(index(a) for a in (last, *line.axes))
        loaded = tuple(Load(part, where) for part in self.partial[line])
        one = self.squares.get(line)
        if one is None:
            return loaded
        (found,), (sums,) = loaded, self.partial[one.total]
        total = Load(sums, (index(last), *one.place))
        rows = count_rows(self.cuts[line].inner, found.dtype)
        rows = rows.substitute({self.cuts[line].part: index(last)})
        return (joined(found, total, rows, one.centre),)


def _worth_splitting(line: Def, reduction: Reduce, machine: Machine) -> bool:
    rows = product(a.extent for a in reduction.over).hint()
    kept = product(a.extent for a in line.axes).hint()
    if (
        factors(reduction) is not None  # a product of matrices has schedules of its own
        or rows * kept < machine.tuning.split_elements
        or rows < 2 * machine.tuning.least_part_rows
        or reduction.axes - set(line.axes)
    ):
        return False
    if kept * 4 > rows * kept:  # the partial buffer would rival the input
        return False
    if _contiguous_axis_is_kept(reduction):
        # Windows, say: short columns, and as many as fill the machine without parts.
        return rows > machine.tuning.most_part_rows or kept < machine.units * machine.tile
    # A row that one program reads in less time than two more kernels take stays whole.
    row_us = rows * reduction.dtype.itemsize * machine.units / machine.bytes_per_us
    return kept < machine.units // 2 and row_us > 2 * machine.launch_us


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


def _cut(reduction: Reduce, wanted: int, long: bool) -> _Split | None:
    """Spread the outermost reduced axes over about ``wanted`` parts on one axis.

    Args:
        long: one row fills an iteration, so that a last part may end at any.
    """
    counts: list[tuple[Axis, Index, Index]] = []  # reduced axis, parts of it, rows in a part
    for axis in reduction.over:
        extent = axis.extent.hint()
        if wanted > 1 and extent <= wanted:
            counts.append((axis, axis.extent, index(1)))
            wanted //= max(extent, 1)
        elif wanted > 1:
            counts.append((axis, *_cut_extent(axis.extent, wanted, LONG_LOSS if long else LOSS)))
            wanted = 1
        else:
            counts.append((axis, index(1), axis.extent))
    part = Axis("p", product(parts for _, parts, _ in counts))
    if part.extent is index(1):
        return None
    inner: list[Axis] = []
    value: dict[Axis, Index] = {}
    left = index(part)
    for axis, parts, height in reversed(counts):
        outer = left % parts
        left = left // parts
        if height is index(1):
            value[axis] = outer
            continue
        ragged = parts * height is not axis.extent
        limit = axis.extent - outer * height if ragged else None
        within = Axis(axis.name, height, limit)
        inner.insert(0, within)
        value[axis] = outer * height + index(within)
    return _Split(part, tuple(inner), value) if inner else None


def _cut_extent(extent: Index, parts: int, loss: int) -> tuple[Index, Index]:
    """Return (parts, rows a part): even where a divisor is near, else the last is short.

    A divisor takes at most one of ``loss`` parts away: each may be a program for a multiprocessor.
    """
    rows = floordiv(extent + (parts - 1), index(parts))
    if not extent.is_constant:
        return index(parts), rows
    exact = [
        r for r in range(rows.const, rows.const * (loss + 1) // loss + 1) if extent.const % r == 0
    ]
    rows = index(exact[0]) if exact else rows
    return index(-(-extent.const // rows.const)), rows
