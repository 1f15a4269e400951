"""Scatters and scans: reductions that take one step for each point, one after another.

Two comparisons say how a reduction is to run. Their values are those of ``==`` and ``<=``; another
name marks the reduction, so that a loop runs it that takes one step for each point. Where
``hits(n, p)`` is false each term is the identity: the reduction is a *scatter*, a loop over its
sources that combines each with the element that it hits. With ``until(j, i)`` it is a *scan*: the
loop over i combines the term at i with the result before. With ``until(i, j)`` it runs backwards,
from the last point. ``index_add`` and ``cumsum``::

    y[n, c] = sum(e: where(hits(n, p[e]), x[e, c], 0))
    y[m, i] = sum(j: where(until(j, i), x[m, j], 0))

Compared element by element these take a step for each n and e, and for each i and j.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fusec.ir.combine import identities
from fusec.ir.dtype import BOOL
from fusec.ir.expr import (
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Scan,
    Select,
    axes_in,
    children,
    postorder,
    reductions,
    substitute_all,
)
from fusec.ir.graph import Kernel, Store, kernel_nodes
from fusec.ir.index import Axis, Index, index
from fusec.ir.rewrite import fresh_bound_axes, rewrite

_TRUE, _ONE = Const(True, BOOL), index(1)


@dataclass(frozen=True, slots=True)
class Hit:
    """An axis of a scatter's result, and where along it each source counts.

    Attributes:
        place: it may vary along axes of the result, too: each row has places of its own.
        condition: ``hits(before + axis, place)``.
        before: where the axis begins, if it is a part of one that was cut; else 0.
    """

    axis: Axis
    place: Expr
    condition: Expr
    before: Index

    @property
    def point(self) -> Expr:
        """Where along the axis, which may be out of its range."""
        if self.before is index(0):
            return self.place
        return Op("sub", (self.place, IndexValue(self.before, self.place.dtype)))


@dataclass(frozen=True, slots=True)
class StoredScatter:
    """The store whose value a scatter computes, and the value that its elements begin with."""

    store: Store
    start: Expr


@functools.lru_cache(maxsize=1 << 12)
def hits_of(node: Reduce) -> tuple[Hit, ...]:
    """Return the axes along which a reduction scatters; none if it is any other reduction."""
    if len(node.bodies) != 1:
        return ()
    found = [_hit(c, node) for c in needed_conditions(node.body, *identities(node))]
    hits = tuple(hit for hit in found if hit is not None)
    axes = frozenset(hit.axis for hit in hits)
    return hits if all(axes.isdisjoint(hit.place.axes) for hit in hits) else ()


def _hit(condition: Expr, node: Reduce) -> Hit | None:
    if not isinstance(condition, Op) or condition.name != "hits":
        return None
    here, place = condition.args
    if not isinstance(here, IndexValue) or not here.axes.isdisjoint(node.over):
        return None
    steps = [a for a in here.axes if here.index.coefficient(a) is _ONE]
    if len(steps) != 1:
        return None
    return Hit(steps[0], place, condition, here.index - index(steps[0]))


def scan_of(node: Reduce) -> Scan | None:
    """Return a reduction over the points up to each along an axis as a ``Scan``, else None.

    If it ``runs_backwards``, this is the scan of the axis turned around, with its terms as yet
    where they were.
    """
    found = _scan(node)
    return None if found is None else found[0]


def runs_backwards(node: Reduce) -> bool:
    """Return True for a scan whose first point is the last one along its axis."""
    found = _scan(node)
    return found is not None and found[1]


@functools.lru_cache(maxsize=1 << 12)
def _scan(node: Reduce) -> tuple[Scan, bool] | None:
    """Return a reduction as a scan, and whether that runs backwards."""
    needed = [
        frozenset(needed_conditions(b, e))
        for b, e in zip(node.bodies, identities(node), strict=True)
        if b is not e
    ]
    for condition in frozenset.intersection(*needed) if needed else ():
        if not isinstance(condition, Op) or condition.name != "until":
            continue
        first, second = map(_axis, condition.args)
        for last, along in ((first, second), (second, first)):
            if last is None or along is None or along.extent is not last.extent:
                continue
            terms = rewrite(node.bodies, _without, {condition: _TRUE})
            if node.over == (last,) and all(along not in term.axes for term in terms):
                scan = Scan(node.monoid, (along,), *_moved(terms, last, along))
                return scan, last is second
    return None


def turned(axis: Axis) -> Index:
    """Return the position along an axis when it is counted from its end."""
    return axis.extent - 1 - index(axis)


def from_the_end(node: Expr) -> Expr:
    """Return a scan that is read from its end as one that runs the other way; others as they are.

    sum(j: where(until(j, n-1-i), x[j], 0))    is    sum(j: where(until(i, j), x[n-1-j], 0))
    """
    match node:
        case Reduce(over=(last,)) if scan_of(node) is None:

            def swapped(value: Expr) -> Expr:
                match value:
                    case Op(name="until", args=(IndexValue() as a, IndexValue() as b)):
                        ends = (IndexValue(last.extent - 1 - x.index, x.dtype) for x in (b, a))
                        return Op("until", tuple(ends))
                return value

            bodies = substitute_all(node.bodies, {last: turned(last)})
            made = Reduce(node.monoid, node.over, *rewrite(bodies, swapped))
            return made if scan_of(made) is not None else node
    return node


def _moved(terms: tuple[Expr, ...], last: Axis, along: Axis) -> tuple[Expr, ...]:
    """Return terms with one axis in the place of another, which none of their reductions binds."""
    inner = [n for term in terms for n in reductions(term)]
    kept: dict[Expr, Expr] = {n: n for n in inner if last not in n.axes}  # some bind it themselves
    if any(along in n.over and last in n.axes for n in inner):
        terms = tuple(fresh_bound_axes(term, kept) for term in terms)
    return substitute_all(terms, {last: index(along)}, kept)


def _without(node: Expr) -> Expr:
    """Return a node without conditions that are true."""
    match node:
        case Select(condition=condition, then=value) if condition is _TRUE:
            return value
        case Load(guard=guard) if guard is _TRUE:
            return Load(node.buffer, node.indices)
        case Op(name="and", args=args) if _TRUE in args:
            return next((arg for arg in args if arg is not _TRUE), _TRUE)
    return node


def serial_axes(nodes: Iterable[Expr]) -> frozenset[Axis]:
    """Return the axes along which the reductions among some nodes scatter or scan."""
    found: set[Axis] = set()
    for node in nodes:
        if isinstance(node, Reduce):
            found.update(hit.axis for hit in hits_of(node))
            if (scan := scan_of(node)) is not None:
                found.update(scan.over)
    return frozenset(found)


def serial_reductions(kernel: Kernel) -> list[Reduce]:
    """Return the scatters and scans of a kernel."""
    return [n for n in kernel.reductions if serial_axes((n,))]


def shared_axes(kernel: Kernel) -> tuple[Axis, ...]:
    """Return the axes whose parts threads may share, each for the sources that hit there.

    All that the kernel stores varies along them. Each part reads the places of all sources.
    """
    found = kernel.reductions
    stored = (axes_in(store.indices) for store in kernel.stores)
    places = frozenset(hit.axis for n in found for hit in hits_of(n))
    free = places.intersection(*stored).difference(*(n.over for n in found))
    return tuple(a for a in kernel.inside if a in free)


def stored_scatters(kernel: Kernel) -> dict[Reduce, StoredScatter]:
    """Return the scatters that run in the memory of a kernel's results.

    A result is a scatter, or what one is combined with and the scatter, which nothing else reads.
    """
    found: dict[Reduce, StoredScatter] = {}
    stored = [store.expr for store in kernel.stores]
    for store in kernel.stores:
        for node, start in _reductions_with_start(store.expr):
            if not hits_of(node) or node.dtype is not store.buffer.dtype:
                continue
            readers = [n for n in kernel_nodes(kernel) if node in children(n)]
            if store.expr is node or (readers == [store.expr] and node not in stored):
                found.setdefault(node, StoredScatter(store, start))
    return found


def _reductions_with_start(value: Expr) -> Iterator[tuple[Reduce, Expr]]:
    """Yield each reduction that makes a value, with the value that it begins with."""
    match value:
        case Reduce():
            yield value, identities(value)[-1]
        case Op(name=name, args=(a, b)):
            reduced = ((n, x) for n, x in ((a, b), (b, a)) if isinstance(n, Reduce))
            for node, start in reduced:
                if node.monoid.combine == name and not serial_axes(postorder((start,))):
                    yield node, start


def _axis(value: Expr) -> Axis | None:
    return value.index.as_axis() if isinstance(value, IndexValue) else None


def needed_conditions(node: Expr, identity: Const) -> Iterator[Expr]:
    """Yield conditions such that a value is the identity where any of them is false."""
    match node:
        case Select(condition=condition, then=value, other=Const() as other) if other is identity:
            yield from _conjuncts(condition)
            yield from needed_conditions(value, identity)
        case Load(guard=guard) if guard is not None and identity.value == 0:
            yield from _conjuncts(guard)
        case Cast(arg=value) if identity.value == 0:
            yield from needed_conditions(value, Const(0, value.dtype))
        case Op(name="mul", args=(a, b)) if identity.value == 0:  # 0 * NaN is not 0
            others = frozenset(needed_conditions(b, Const(0, b.dtype)))
            yield from (c for c in needed_conditions(a, Const(0, a.dtype)) if c in others)


def _conjuncts(condition: Expr) -> Iterator[Expr]:
    if isinstance(condition, Op) and condition.name == "and":
        for part in condition.args:
            yield from _conjuncts(part)
    else:
        yield condition
