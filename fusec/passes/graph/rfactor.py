"""Rewrite a reduction as partial reductions and a final one, for every pass that splits one.

(Halide's word: Suriana, Adams and Kamil, "Parallel associative reductions in Halide", 2017.) An
``AxisSplit`` describes the iterations of a part. A pass decides which reductions are split, and
how; the partial and final expressions are the same for all passes::

    plain     w = sum(n: f)                 w[p] = sum(i: f);  w = sum(p: w[p])
    squares   q = sum(n: (f - g)^2)         about the parts' means (``squares.py``)
              beside s = sum(n: f)
    weights   l = sum(n: exp(f - m)*w)      relative to the parts' maxima (``split_loop.py``)
              beside m = max(n: f)

Worked example: with n = p*R + i, ``w[c] = sum(n: x[n, c])`` becomes the lines ``w_part[p, c] =
sum(i: x[p*R + i, c])`` and ``w[c] = sum(p: w_part[p, c])``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from fusec.ir.combine import rfactor
from fusec.ir.expr import Buffer, Expr, Load, Reduce, reductions
from fusec.ir.graph import Def
from fusec.ir.index import Axis, Index, floordiv, index, mod
from fusec.ir.rewrite import Rewriter
from fusec.passes.graph.squares import Moments, count_rows, find_squares, joined

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """The reduced axes of a reduction, split into parts.

    Attributes:
        part: the axis of the parts.
        inner: the axes that one part reduces.
        value: reduced axis -> index over ``part`` and ``inner``.
    """

    part: Axis
    inner: tuple[Axis, ...]
    value: Mapping[Axis, Index]

    def inside(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Return ``axes`` as they are inside a part: split ones are replaced by ``inner``."""
        return tuple(b for a in axes for b in (self.inner if a in self.value else (a,)))


def cut_axis(axis: Axis, terms: int) -> AxisSplit:
    """Return the split of an axis into parts of ``terms`` terms; the last one may be short."""
    part = Axis("p", floordiv(axis.extent + (terms - 1), index(terms)))
    start = index(part) * terms
    even = mod(axis.extent, index(terms)) is index(0)
    within = Axis(axis.name, index(terms), None if even else axis.extent - start)
    return AxisSplit(part, (within,), {axis: start + index(within)})


class Splitter:
    """Splits lines of a graph, one after another, into partial lines and a final one.

    Args:
        cuts: line with one reduction -> its split; other lines stay.
        moments: how a part computes the squared deviations from its mean.
        fastest: the part axis is the fastest of partial buffers, so that the parts of one sum are
            contiguous; else it is the slowest.
    """

    def __init__(self, cuts: Mapping[Def, AxisSplit], moments: Moments, *, fastest: bool) -> None:
        self.cuts, self.moments, self.fastest = cuts, moments, fastest
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
        for found in self._found(line, {**renamed, **cut.value}):
            name = f"{line.buffer.name}_part{len(partial) or ''}"
            axes = self._order(cut.part, own)
            part = Buffer.row_major(name, tuple(a.extent for a in axes), found.dtype)
            partial.append(Def(part, axes, found, line.origin))
        self.partial[line] = tuple(part.buffer for part in partial)
        last = Axis(cut.part.name, cut.part.extent)
        final = Reduce(reduction.monoid, (last,), *self._terms(line, last))
        return *partial, line.map(Rewriter(lambda node: final if node is reduction else node))

    def _found(self, line: Def, into: Mapping[Axis, Index]) -> tuple[Expr, ...]:
        """Return the partial values of a line's reduction, over the axes of the partial lines."""
        cut = self.cuts[line]
        one = self.squares.get(line)
        if one is not None:
            total = self._total(line, cut.part).substitute(into)
            return (self.moments.squares(one.value.substitute(into), cut.inner, total),)
        if line in self.totals:
            value = self.reductions[line].body.substitute(into)
            return (self.moments.total(value, cut.inner),)
        return rfactor(self.reductions[line], into, cut.inner)

    def _terms(self, line: Def, part: Axis) -> tuple[Expr, ...]:
        """Return a part's terms of the final reduction, over the line's axes and the part axis."""
        where = tuple(map(index, self._order(part, line.axes)))
        loaded = tuple(Load(found, where) for found in self.partial[line])
        one = self.squares.get(line)
        if one is None:
            return loaded
        cut, (found,) = self.cuts[line], loaded
        rows = count_rows(cut.inner, found.dtype).substitute({cut.part: index(part)})
        return (joined(found, self._total(line, part), rows, one.centre),)

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
