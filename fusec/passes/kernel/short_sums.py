"""Write out sums over few elements with constant factors, as the transforms of Winograd are.

``written_out`` does so in an expression: terms whose factor is 0 are left out, and equal parts of
sums stay one node. ``unroll_terms`` does so in a kernel of such sums alone, together with the grid
axes that only the factors vary along: all results of the same elements are then computed at once.

Spec: ``flat kernel -> flat kernel``, the same values.

Worked example, a filter's four terms::

    u[a, n] = sum(k: G[a, k] * w[3*n + k])       grid a:4 n:N  inside k:3
    u[n] = w[3*n];  u[n + N] = 0.5*w[3*n] + 0.5*w[3*n + 1] + 0.5*w[3*n + 2];  ...      grid n:N
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from fusec.ir.expr import (
    Const,
    Expr,
    Load,
    Op,
    Reduce,
    axes_in,
    children,
    reach,
    substitute,
)
from fusec.ir.graph import FlatKernel, Store, kernel_nodes
from fusec.ir.index import Axis, Index, index
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import Normalizer, is_index_only, replace_nodes, with_own_axes
from fusec.ir.transformed import is_short
from fusec.passes.graph.simplify import simplifier

MOST_POINTS = 16
"""Most results of the same elements that are computed at once: registers hold them."""


def points(axes: tuple[Axis, ...]) -> Iterator[dict[Axis, Index]]:
    """Yield each point of short axes, as a substitution."""
    for point in itertools.product(*(range(a.extent.const) for a in axes)):
        yield dict(zip(axes, map(index, point), strict=True))


def written_out(root: Expr, simplify: Normalizer) -> Expr:
    """Return an expression with each sum over few elements written out.

    Args:
        simplify: decides comparisons of constants.
    """
    (root,) = simplify((root,))
    sums = [n for n in reach((root,), _but_sums) if isinstance(n, Reduce)]
    return replace_nodes((root,), {n: _added(n, simplify) for n in sums})[0]


def _but_sums(node: Expr) -> tuple[Expr, ...]:
    return () if isinstance(node, Reduce) else children(node)


def _added(node: Reduce, simplify: Normalizer) -> Expr:
    added: list[tuple[float, Expr]] = []
    for point in points(node.over):
        (term,) = simplify((node.body.substitute(point),))
        factor, rest = _scaled(term)
        if factor:
            added.append((factor, written_out(rest, simplify)))
    if not added:
        return Const(0, node.dtype)
    added.sort(key=lambda pair: pair[0] < 0)  # if possible, the first is not negated
    (factor, total), *others = added
    if factor != 1:
        total = Op("mul", (Const(factor, node.dtype), total))
    for factor, rest in others:
        if abs(factor) != 1:
            rest = Op("mul", (Const(abs(factor), node.dtype), rest))
        total = Op("add" if factor > 0 else "sub", (total, rest))
    return total


def _scaled(term: Expr) -> tuple[float, Expr]:
    """Return a term of a sum as a number times the rest."""
    match term:
        case Const(value=value):
            return (float(value), Const(1, term.dtype))
        case (
            Op(name="mul", args=(Const(value=value), rest))
            | Op(name="mul", args=(rest, Const(value=value)))
        ):
            return float(value), rest
    return 1.0, term


def unroll_terms(kernel: FlatKernel) -> FlatKernel:
    """Return a kernel of short sums with constant factors written out; any other unchanged."""
    terms = _terms(kernel)
    if not terms:
        return kernel
    exprs = with_own_axes(tuple(store.expr for store in kernel.stores))
    simplify = simplifier()
    stores = [
        Store(
            store.buffer,
            (substitute(store.indices[0], point),),
            written_out(expr.substitute(point), simplify),
        )
        for point in points(terms)
        for store, expr in zip(kernel.stores, exprs, strict=True)
    ]
    grid = tuple(a for a in kernel.grid if a not in terms)
    return FlatKernel(replace(kernel, grid=grid, inside=(), stores=tuple(stores), labels=()))


def _terms(kernel: FlatKernel) -> tuple[Axis, ...]:
    """Return the short grid axes that only the factors of a kernel's sums vary along.

    None unless all its sums are short, and have a factor that reads no memory.
    """
    nodes = kernel_nodes(kernel)
    sums = [n for n in nodes if isinstance(n, Reduce)]
    if not all(n.monoid is SUM and all(map(is_short, n.over)) for n in sums):
        return ()
    factors = [side for n in sums for side in children(n.body) if is_index_only(side)]
    if len(factors) != len(sums) or not all(_is_product(n.body) for n in sums):
        return ()
    along = axes_in(factors) - axes_in(n for n in nodes if isinstance(n, Load))
    found = tuple(a for a in kernel.grid if a in along and is_short(a))
    stored = all(set(found) <= s.indices[0].axes for s in kernel.stores)
    return found if stored and len(list(points(found))) <= MOST_POINTS else ()


def _is_product(node: Expr) -> bool:
    return isinstance(node, Op) and node.name == "mul"
