"""Rewrite a reduction as partial reductions and a final one, for every pass that splits one.

(Halide's word: Suriana, Adams and Kamil, "Parallel associative reductions in Halide", 2017.) An
``AxisSplit`` describes the iterations of a part. A pass decides which reductions are split, and
how; the partial and final expressions are the same for all passes::

    plain     w = sum(n: f)                 w[p] = sum(i: f);  w = sum(p: w[p])
    squares   q = sum(n: (f - g)^2)         about the parts' means (``squares.py``)
              beside s = sum(n: f)
    weights   l = sum(n: exp(f - m)*w)      relative to the parts' maxima (``ir/online.py``)
              beside m = max(n: f)

Worked example: with n = p*R + i, ``w[c] = sum(n: x[n, c])`` becomes the lines ``w_part[p, c] =
sum(i: x[p*R + i, c])`` and ``w[c] = sum(p: w_part[p, c])``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from fusec.ir.combine import AxisSplit, rfactor
from fusec.ir.expr import Buffer, Expr, Load, Reduce, reductions
from fusec.ir.graph import Def
from fusec.ir.index import Axis, Index, floordiv, index, product
from fusec.ir.rewrite import replace_nodes
from fusec.passes.graph.squares import Shift, count_rows, find_squares, merged, squares, total

_T = TypeVar("_T")


def split_axes(counts: Iterable[tuple[Axis, Index, Index]]) -> AxisSplit:
    """Return a split into parts along one new axis.

    Args:
        counts: each reduced axis, outermost first, its number of parts, and the terms of each. The
            last part may be short.
    """
    counts = tuple(counts)
    part = Axis("p", product(parts for _, parts, _ in counts))
    inner: list[Axis] = []
    value: dict[Axis, Index] = {}
    left = index(part)
    for axis, parts, terms in reversed(counts):
        outer = left % parts
        left = left // parts
        if terms is index(1):
            value[axis] = outer
            continue
        start = outer * terms
        even = parts * terms is axis.extent
        inner.insert(0, Axis(axis.name, terms, None if even else axis.extent - start))
        value[axis] = start + index(inner[0])
    return AxisSplit(part, tuple(inner), value)


def cut_axis(axis: Axis, terms: int) -> AxisSplit:
    """Return the split of an axis into parts of ``terms`` terms."""
    parts = floordiv(axis.extent + (terms - 1), index(terms))
    return split_axes([(axis, parts, index(terms))])


class Splitter:
    """Splits lines of a graph, one after another, into partial lines and a final one.

    Args:
        cuts: line with one reduction -> its split; other lines stay.
        shift: the shift of a part's moments that takes one sweep to compute; None: two sweeps.
        fastest: the part axis is the fastest of partial buffers, so that the parts of one sum are
            contiguous; else it is the slowest.
    """

    def __init__(
        self, cuts: Mapping[Def, AxisSplit], shift: Shift | None, *, fastest: bool
    ) -> None:
        self.cuts, self.shift, self.fastest = cuts, shift, fastest
        self.reductions = {line: one_reduction(line) for line in cuts}
        self.squares = {
            line: one
            for line, one in find_squares(self.reductions).items()
            if _extents(cuts[line]) == _extents(cuts[one.total])
        }
        self.totals = {one.total for one in self.squares.values()}
        self.partial: dict[Def, tuple[Buffer, ...]] = {}

    def split(self, line: Def) -> tuple[Def, ...]:
        """Return the line itself, or its partial lines and the final one if it is split."""
        if line not in self.cuts:
            return (line,)
        cut, reduction = self.cuts[line], self.reductions[line]
        own = tuple(Axis(a.name, a.extent) for a in line.axes)
        renamed = {a: index(b) for a, b in zip(line.axes, own, strict=True)}
        partial: list[Def] = []
        for found in self._found(line, replace(cut, value={**renamed, **cut.value})):
            name = f"{line.buffer.name}_part{len(partial) or ''}"
            axes = self._order(cut.part, own)
            part = Buffer.row_major(name, tuple(a.extent for a in axes), found.dtype)
            partial.append(Def(part, axes, found, line.origin))
        self.partial[line] = tuple(part.buffer for part in partial)
        last = Axis(cut.part.name, cut.part.extent)
        final = Reduce(reduction.monoid, (last,), *self._terms(line, last))
        return *partial, line.map(lambda exprs: replace_nodes(exprs, {reduction: final}))

    def _found(self, line: Def, cut: AxisSplit) -> tuple[Expr, ...]:
        """Return the state of each part of a line's reduction."""
        reduction, one = self.reductions[line], self.squares.get(line)
        if one is not None:
            sums = self._total(line, cut.part).substitute(cut.value)
            return (squares(one.value.substitute(cut.value), cut.inner, self.shift, sums),)
        if line in self.totals:
            return (total(reduction.body.substitute(cut.value), cut.inner, self.shift),)
        return rfactor(reduction, cut)

    def _terms(self, line: Def, part: Axis) -> tuple[Expr, ...]:
        """Return a part's terms of the final reduction, over the line's axes and the part axis."""
        where = tuple(map(index, self._order(part, line.axes)))
        loaded = tuple(Load(found, where) for found in self.partial[line])
        one = self.squares.get(line)
        if one is None:
            return loaded
        cut, (found,) = self.cuts[line], loaded
        rows = count_rows(cut.inner, found.dtype).substitute({cut.part: index(part)})
        return (merged(found, self._total(line, part), rows, one.centre),)

    def _total(self, line: Def, part: Axis) -> Load:
        """Return the load of a part's sum of the values whose squares a line sums."""
        one = self.squares[line]
        (sums,) = self.partial[one.total]
        return Load(sums, self._order(index(part), one.place))

    def _order(self, part: _T, others: tuple[_T, ...]) -> tuple[_T, ...]:
        """Return the part axis and the others in memory order, slowest first."""
        return (*others, part) if self.fastest else (part, *others)


def one_reduction(line: Def) -> Reduce:
    """Return the reduction of a line with exactly one."""
    (reduction,) = reductions(line.expr)
    return reduction


def _extents(cut: AxisSplit) -> list[Index]:
    return [axis.extent for axis in (cut.part, *cut.inner)]
