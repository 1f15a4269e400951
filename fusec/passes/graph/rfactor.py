"""Compute a reduction in parts and combine what these find: the rewrite of all that splits one.

(Halide's word: Suriana, Adams and Kamil, "Parallel associative reductions in Halide", 2017.) A
``AxisSplit`` says which points a part has. A pass decides which reductions are cut, and how; what a
part finds, and what the parts come to, is the same for all of them::

    plain     w = sum(n: f)                 w[p] = sum(i: f);  w = sum(p: w[p])
    squares   q = sum(n: (f - g)^2)         about the parts' means (``squares.py``)
              beside s = sum(n: f)
    weights   l = sum(n: exp(f - m)*w)      beside the parts' maxima (``split_loop.py``)
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
    """The points of a reduction in parts.

    Attributes:
        part: counts the parts.
        inner: the axes that one part sums over.
        value: reduced axis -> index over ``part`` and ``inner``.
    """

    part: Axis
    inner: tuple[Axis, ...]
    value: Mapping[Axis, Index]

    def inside(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Return what is left of some axes inside a part: of the cut one, its part."""
        return tuple(b for a in axes for b in (self.inner if a in self.value else (a,)))


def cut_axis(axis: Axis, terms: int) -> AxisSplit:
    """Return an axis in parts of so many terms; the last is short where they do not fit."""
    part = Axis("p", floordiv(axis.extent + (terms - 1), index(terms)))
    start = index(part) * terms
    even = mod(axis.extent, index(terms)) is index(0)
    within = Axis(axis.name, index(terms), None if even else axis.extent - start)
    return AxisSplit(part, (within,), {axis: start + index(within)})


class Splitter:
    """Splits the lines of a graph, one after another, in partial lines and a final one.

    Args:
        cuts: of each line that is split, which has one reduction.
        moments: how a part finds the squares about its mean.
        fastest: the parts of one sum lie beside each other in memory; else those of all sums do,
            part after part.
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
        """Return a line, or those of parts and of the whole in its place if it is cut."""
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
        """Return what a part of a line's reduction is, over the axes of the partial lines."""
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
        """Return what a part adds to the whole, over the line's axes and that of parts."""
        where = tuple(map(index, self._order(part, line.axes)))
        loaded = tuple(Load(found, where) for found in self.partial[line])
        one = self.squares.get(line)
        if one is None:
            return loaded
        cut, (found,) = self.cuts[line], loaded
        rows = count_rows(cut.inner, found.dtype).substitute({cut.part: index(part)})
        return (joined(found, self._total(line, part), rows, one.centre),)

    def _total(self, line: Def, part: Axis) -> Load:
        """Return the sum, in a part, of the values whose squares a line sums."""
        one = self.squares[line]
        (sums,) = self.partial[one.total]
        return Load(sums, self._order(index(part), one.place))

    def _order(self, part: _T, others: tuple[_T, ...]) -> tuple[_T, ...]:
        """Return the axis of parts and others as they lie in memory, slowest first."""
        return (*others, part) if self.fastest else (part, *others)


def one_reduction(line: Def) -> Reduce:
    """Return the reduction of a line that has one alone."""
    (reduction,) = reductions(line.expr)
    return reduction


def _extents(cut: AxisSplit) -> list[Index]:
    return [axis.extent for axis in (cut.part, *cut.inner)]
