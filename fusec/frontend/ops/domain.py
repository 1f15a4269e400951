"""Domains: the points that one element of a result is reduced over, and reductions over them.

The reduced axes of a tensor, the prefix of an element, the elements of a window, the sources of a
scatter: each is a *domain*: axes that enumerate points, the indices of each point, and the guard
under which it counts. Worked example, ``cumsum`` of n elements; the domain of y[i] has the axes
``(j,)``, the indices ``(j,)`` and the guard ``j <= i``::

    y[i] = sum(j: where(j <= i, x[j], 0))

A scan, a scatter or a search in this *direct form* recomputes what an eager kernel keeps between
elements. It is one kernel, which fuses, is deterministic, and takes (elements of the result) x
(points of each) steps where the eager kernel takes their sum. Where these are few
(``FusionTuning.direct_steps``), it costs less than an eager call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Body, Indices
from fusec.frontend.ops.arithmetic import less, select
from fusec.frontend.ops.views import linearise, replaced, wrap
from fusec.frontend.value import ONE, ZERO, Value
from fusec.ir.dtype import BOOL, F32, I32, I64, DType, compute_type
from fusec.ir.expr import Const, Expr, IndexValue, Reduce, both, cast, op
from fusec.ir.index import Axis, Index, index, product
from fusec.ir.monoid import ALL, ANY, ARGMAX, ARGMIN, MAX, MIN, SUM, Monoid
from fusec.ir.scalar import ROUND


@dataclass(frozen=True, slots=True)
class Domain:
    """The points that one element of a result combines.

    Attributes:
        axes: enumerate the points; an axis of one element is left out of reductions.
        where: a point's indices into the tensor that is reduced.
        number: a point's number, in row-major order or by its position in the whole tensor.
        inside: whether a point lies in the tensor's memory; None: all do.
        guard: whether a point counts; None: all do.
    """

    axes: tuple[Axis, ...]
    where: Indices
    number: Index
    inside: Expr | None = None
    guard: Expr | None = None

    def read(self, x: Value, kind: DType) -> Expr:
        """Return a tensor's element at a point, or 0 if the point is not inside."""
        return cast(x.at(self.where, self.inside), kind)

    def exact(self, x: Value, kind: DType) -> Expr:
        """Return the element as ``read`` does, but a 16-bit float is rounded as it is stored."""
        if x.dtype in ROUND:
            return cast(op(ROUND[x.dtype], self.read(x, F32)), kind)
        return self.read(x, kind)

    def term(self, x: Value, kind: DType) -> Expr:
        """Return an element in an accumulation type: read exactly if that is an integer type."""
        return self.read(x, kind) if kind.is_float else self.exact(x, kind)

    def reduce(self, monoid: Monoid, *values: Expr, only: Expr | None = None) -> Expr:
        """Return the reduction of values over the points that count and satisfy ``only``."""
        counts = both(both(self.inside, self.guard), only)
        return self._over(monoid, values, counts)

    def total(self, x: Value, kind: DType) -> Expr:
        """Return the sum of a tensor's elements; outside they are read as 0."""
        return self._over(SUM, (self.read(x, kind),), self.guard)

    def _over(self, monoid: Monoid, values: tuple[Expr, ...], counts: Expr | None) -> Expr:
        if counts is not None:
            pairs = zip(monoid.fields, values, strict=True)
            values = tuple(select(counts, v, identity(part, v.dtype)) for part, v in pairs)
        over = tuple(axis for axis in self.axes if axis.extent is not ONE)
        return Reduce(monoid, over, *values) if over else values[-1]


Domains: TypeAlias = Callable[[Indices], Domain]
"""Returns the domain of the result's element at some indices, with fresh axes at each call."""


def reduction(over: Domains, monoid: Monoid, value: Callable[[Domain], Expr]) -> Body:
    """Return ``monoid(points: value)`` as a function of the result's indices."""

    def body(at: Indices) -> Expr:
        domain = over(at)
        return domain.reduce(monoid, value(domain))

    return body


def identity(monoid: Monoid, dtype: DType) -> Const:
    return Const(monoid.identity(dtype), dtype)


# -- the domains of reductions and scans ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """The reduced dimensions of a tensor's shape; with ``keepdim`` they stay, with extent 1."""

    extents: Indices
    dims: tuple[int, ...]
    keepdim: bool

    @property
    def shape(self) -> Indices:
        """The shape of the result."""
        kept = [ONE if d in self.dims else e for d, e in enumerate(self.extents)]
        if self.keepdim:
            return tuple(kept)
        return tuple(e for d, e in enumerate(kept) if d not in self.dims)

    def count(self, kind: DType) -> Expr:
        """Return the number of elements that one result combines."""
        total = product(self.extents[d] for d in self.dims)
        return cast(IndexValue(total), kind) if total.terms else Const(total.const, kind)

    def at(self, at: Indices) -> Domain:
        """Return the domain of the result's element at ``at``."""
        axes = {d: Axis(f"r{d}", self.extents[d]) for d in self.dims}
        where = [ZERO if a.extent is ONE else index(a) for a in axes.values()]
        number = linearise(tuple(where), tuple(self.extents[d] for d in self.dims))
        return Domain(tuple(axes.values()), self._where(at, where), number)

    def first(self, at: Indices) -> Indices:
        """Return the indices of the first point of the domain at ``at``."""
        return self._where(at, [ZERO] * len(self.dims))

    def _where(self, at: Indices, reduced: Sequence[Index]) -> Indices:
        inner, kept = iter(reduced), iter(at)
        full: list[Index] = []
        for d in range(len(self.extents)):
            outer = ZERO if d in self.dims and not self.keepdim else next(kept)
            full.append(next(inner) if d in self.dims else outer)
        return tuple(full)


def region(x: Value, dims: Sequence[int] | int | None, keepdim: bool = False) -> Region:
    """Return the reduced region; no dimensions, or None, means all of them.

    Raises:
        Unsupported: if it has no elements.
    """
    rank = len(x.shape)
    if isinstance(dims, int):
        dims = (dims,)
    named = {wrap(d, rank) for d in dims} if dims else set(range(rank))
    chosen = sorted(named) if rank else []
    if any(x.shape[d] is ZERO for d in chosen):
        raise Unsupported("an empty tensor")
    return Region(x.shape, tuple(chosen), keepdim)


def prefixes(call: AtenCall, x: Value, dim: int, reason: str) -> tuple[Domains, bool]:
    """Return the domains of a scan: the elements at or before each; of a scalar, itself.

    And whether these are short, in all, so that each is reduced by itself.

    Raises:
        Unsupported: with the reason, if they are not, on a GPU.
    """
    if not x.shape:
        return (lambda at: Domain((), at, ZERO)), call.takes_few_steps(())
    axis = wrap(dim, len(x.shape))
    extent = x.shape[axis]
    few = call.takes_few_steps((extent,))
    if not few and not call.is_cpu:
        raise Unsupported(reason)

    return (lambda at: scanned(extent, axis, at, "le" if few else "until")), few


def scanned(
    extent: Index, axis: int, at: Indices, name: str = "until", *, backwards: bool = False
) -> Domain:
    """Return the domain of a scan's element: the points at or before it, or after it."""
    if extent is ONE:
        return Domain((), at, ZERO)
    over = Axis("j", extent)
    ends = (IndexValue(index(over)), IndexValue(at[axis]))
    counts = op(name, *(reversed(ends) if backwards else ends))
    return Domain((over,), replaced(at, axis, index(over)), index(over), guard=counts)


# -- the extreme and its index --------------------------------------------------------------------


class Pick(enum.Enum):
    """Which of several equal extremes is returned, and which of several NaNs."""

    FIRST = enum.auto()
    LAST = enum.auto()
    FIRST_BUT_LAST_NAN = enum.auto()

    def keys(self, number: Expr) -> tuple[Expr, Expr, Callable[[Expr], Expr]]:
        """Return an element's key from its number, its key if it is NaN, and the inverse function.

        The least key is that of the element to return; keys of NaNs are negative, others are not.
        """
        sign, rest = identity(MAX, number.dtype), identity(MIN, number.dtype)
        other = op("not", number)
        match self:
            case Pick.FIRST:
                return number, op("xor", number, sign), lambda key: key & rest
            case Pick.LAST:
                number = op("xor", other, sign)
                return number, other, lambda key: op("not", key) & rest
            case _:
                return number, other, lambda key: select(less(key, 0), op("not", key), key)


@dataclass(frozen=True, slots=True)
class Extreme:
    """The greatest or least element of each domain of a tensor, and its number.

    NaN counts as greater than any number for MAX, and as less for MIN. 16-bit floats are compared
    as they are stored: values that round to the same one are equal.

    Attributes:
        monoid: MAX or MIN.
        count: an exclusive upper bound of the numbers.
    """

    x: Value
    over: Domains
    monoid: Monoid
    count: Index
    pick: Pick = Pick.FIRST

    @property
    def kind(self) -> DType:
        """The type in which elements are compared; ``value`` reduces bools with ANY or ALL."""
        return BOOL if self.x.dtype is BOOL else compute_type(self.x.dtype)

    @property
    def number(self) -> DType:
        """The type of numbers: a vector has twice as many lanes for those of 32 bits."""
        return I32 if self.count.is_constant and self.count.const < 2**31 else I64

    def define(self, call: AtenCall) -> tuple[Value, Value]:
        """Emit a call's two results: the extremes and their numbers."""
        return call.define(self.value, 0), call.define(self.place, 1)

    def value(self, at: Indices) -> Expr:
        """Return the extreme of the domain at ``at``."""
        monoid = self.monoid
        if self.kind is BOOL:
            monoid = ANY if monoid is MAX else ALL
        domain = self.over(at)
        return domain.reduce(monoid, domain.exact(self.x, self.kind))

    def place(self, at: Indices) -> Expr:
        """Return the number of the extreme in the domain at ``at``: the least key among equals."""
        domain, kind = self.over(at), I32 if self.kind is BOOL else self.kind
        value, own = domain.exact(self.x, kind), IndexValue(domain.number, self.number)
        key, of_nan, of_key = self.pick.keys(own)
        if kind.is_float:
            key = select(op("isnan", value), of_nan, key)
        return of_key(domain.reduce(ARGMAX if self.monoid is MAX else ARGMIN, value, key))
