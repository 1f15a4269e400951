"""Unroll an axis of a kernel: what the stages ``unroll_*`` do alike.

They choose an axis, and places along it. Stores are written at each, and terms of sums added up::

    y[m] = sum(k: x[m, k])                                             grid m:2N inside k:2
    y[2*m] = sum(k: x[2*m, k]);  y[2*m + 1] = sum(k: x[2*m + 1, k])    m at 2*m and 2*m + 1
    y[m] = x[m, 0] + x[m, 1]                                           k at 0 and 1
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeAlias

from fusec.errors import InternalError
from fusec.ir.expr import Const, Expr, Reduce, Select, postorder, substitute
from fusec.ir.graph import FlatKernel, Kernel, Store
from fusec.ir.index import Axis, Index, index
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import Normalizer, guarded_loads, rewrite

Substitution: TypeAlias = Mapping[Axis, Index]
"""A place along the axes that are unrolled: what stands for them."""


def points(axes: tuple[Axis, ...]) -> Iterator[dict[Axis, Index]]:
    """Yield each point of short axes, as a substitution."""
    for point in itertools.product(*(range(a.extent.const) for a in axes)):
        yield dict(zip(axes, map(index, point), strict=True))


def placed(store: Store, at: Substitution, simplify: Normalizer) -> Store:
    """Return a flat kernel's store at a place, simplified."""
    (expr,) = simplify((store.expr.substitute(at),))
    return replace(store, indices=(substitute(store.indices[0], at),), expr=expr)


def unrolled(
    kernel: FlatKernel, instead: Mapping[Axis, tuple[Axis, ...]], stores: Iterable[Store]
) -> FlatKernel:
    """Return a kernel of other stores, with axes ``instead`` of those that were unrolled."""
    grid, inside = (
        tuple(new for axis in axes for new in instead.get(axis, (axis,)))
        for axes in (kernel.grid, kernel.inside)
    )
    return FlatKernel(replace(kernel, grid=grid, inside=inside, stores=tuple(stores), labels=()))


def guarded(value: Expr, axis: Axis, mask: Expr) -> Expr:
    """Return a value whose loads along an axis touch memory only where a mask is true."""

    others = {n: n for n in postorder((value,)) if axis not in n.axes}
    return guarded_loads(value, mask, others)


def added_up(
    kernel: FlatKernel,
    along: Mapping[Axis, tuple[Sequence[Substitution], tuple[Axis, ...]]],
    masks: Sequence[Expr | None] = (),
) -> Kernel:
    """Return a kernel with the terms of sums added up at some places along an axis.

    Args:
        along: axis -> places, and the axes that the sums run over in its place.
        masks: for each place where there are terms; none, and None: everywhere.
    """

    def term(body: Expr, axis: Axis, at: Substitution, mask: Expr | None) -> Expr:
        if mask is None:
            return body.substitute(at)
        found = guarded(body, axis, mask).substitute(at)
        return Select(mask, found, Const(0, found.dtype))

    def rule(node: Expr) -> Expr:
        if not isinstance(node, Reduce) or along.keys().isdisjoint(node.over):
            return node
        if node.monoid is not SUM:
            raise InternalError(f"terms of {node.monoid} are no terms of a sum")
        for own in [axis for axis in node.over if axis in along]:
            places, instead = along[own]
            if not {*node.axes, *node.over}.isdisjoint(instead):
                raise InternalError(f"{node} would bind {instead}")
            pairs = itertools.zip_longest(places, masks)
            terms = (term(node.body, own, at, mask) for at, mask in pairs)
            over = (*(a for a in node.over if a is not own), *instead)
            node = Reduce(SUM, over, reduce(operator.add, terms))
        return node

    return kernel.map(lambda roots: rewrite(roots, rule))
