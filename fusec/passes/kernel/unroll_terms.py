"""Write out sums over few elements, as the transforms of Winograd's minimal filtering are.

``SumWriter`` does so in an expression. ``unroll_terms`` does so in a kernel of such sums alone,
together with the grid axes that only constant factors vary along: all results of the same elements
are then computed at once.

Spec: ``flat kernel -> flat kernel``, the same values.

Worked example, a filter's four terms::

    u[a, n] = sum(k: G[a, k] * w[3*n + k])       grid a:4 n:N  inside k:3
    u[n] = 0 + w[3*n] + 0*w[3*n + 1] + 0*w[3*n + 2];  u[n + N] = ...      grid n:N
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusec.ir.dtype import DType
from fusec.ir.expr import (
    Const,
    Expr,
    IndexValue,
    Op,
    Reduce,
    Select,
    axes_in,
    children,
    is_op,
    reach,
    rebuild,
    substitute,
)
from fusec.ir.graph import FlatKernel
from fusec.ir.index import Axis, Index, product
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import is_index_only
from fusec.ir.transformed import is_short
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.unroll import points, unrolled

MOST_POINTS = 16
"""Most results of the same elements that are computed at once: registers hold them."""


class SumWriter:
    """Writes expressions with each sum over few elements written out, memoised across calls.

    Args:
        zeros: keep terms whose factor is 0, for which infinity and NaN count, and the order of all.
    """

    def __init__(self, *, zeros: bool) -> None:
        self.zeros = zeros
        self.simplify = simplifier()
        self.known: dict[tuple[Expr, tuple[tuple[Axis, Index], ...]], Expr] = {}

    def __call__(self, root: Expr, where: Mapping[Axis, Index]) -> Expr:
        """Return an expression at some indices, simplified."""
        return self.simplify((self.at(root, where),))[0]

    def at(self, root: Expr, where: Mapping[Axis, Index]) -> Expr:
        """Return an expression at some indices."""
        new: dict[Expr, Expr] = {}
        for node in reach((root,), lambda n: () if isinstance(n, Reduce) else children(n)):
            if isinstance(node, Reduce):
                new[node] = self.sum(node, where)
            else:
                new[node] = rebuild(node, new, where)
        return new[root]

    def sum(self, node: Reduce, where: Mapping[Axis, Index]) -> Expr:
        """Return the terms of a sum at some indices, added up."""
        key = (node, tuple((a, i) for a, i in where.items() if a in node.axes))
        if key not in self.known:
            terms = [self.term(node.body, {**where, **point}) for point in points(node.over)]
            self.known[key] = (
                _total(terms, node.dtype) if self.zeros else _shortest(terms, node.dtype)
            )
        return self.known[key]

    def term(self, body: Expr, where: Mapping[Axis, Index]) -> tuple[float, Expr]:
        """Return a term as a number times the rest; without a constant factor the number is 1."""
        if is_op(body, "mul"):
            for factor, rest in (body.args, body.args[::-1]):
                number = _number(factor, where)
                if number is not None:
                    dropped = number == 0 and not self.zeros
                    return number, Const(0, body.dtype) if dropped else self.at(rest, where)
        return 1.0, self.at(body, where)


def _number(node: Expr, where: Mapping[Axis, Index]) -> float | None:
    """Return the value of an expression of floats that reads no memory, at some indices."""
    match node:
        case Const():
            return float(node.value) if node.dtype.is_float else None
        case Select(condition=Op(name="lt", args=(IndexValue() as a, IndexValue() as b))):
            difference = substitute(a.index - b.index, where)
            if not difference.is_constant:
                return None
            return _number(node.then if difference.const < 0 else node.other, where)
        case _:
            return None


def _scaled(number: float, rest: Expr) -> Expr:
    return rest if number == 1 else Op("mul", (Const(number, rest.dtype), rest))


def _total(terms: list[tuple[float, Expr]], dtype: DType) -> Expr:
    """Return a sum as a loop computes it, from 0 on."""
    total: Expr = Const(0, dtype)
    for number, rest in terms:
        total = total + _scaled(number, rest)
    return total


def _shortest(terms: list[tuple[float, Expr]], dtype: DType) -> Expr:
    """Return a sum in the fewest operations: terms of 0 left out, negative ones subtracted."""
    added = sorted((term for term in terms if term[0]), key=lambda term: term[0] < 0)
    if not added:
        return Const(0, dtype)
    (number, rest), *others = added
    total = _scaled(number, rest)
    for number, rest in others:
        term = _scaled(abs(number), rest)
        total = total + term if number > 0 else total - term
    return total


def unroll_terms(kernel: FlatKernel) -> FlatKernel:
    """Return a kernel of short sums with constant factors written out; any other unchanged."""
    terms = _terms(kernel)
    if not terms:
        return kernel
    written_out = SumWriter(zeros=True)
    stores = [
        replace(
            store,
            indices=(substitute(store.indices[0], point),),
            expr=written_out(store.expr, point),
        )
        for point in points(terms)
        for store in kernel.stores
    ]
    return unrolled(kernel, dict.fromkeys((*terms, *kernel.inside), ()), stores)


def _terms(kernel: FlatKernel) -> tuple[Axis, ...]:
    """Return the short grid axes that only the factors of a kernel's sums vary along.

    None unless all its sums are short, and have a factor that reads no memory.
    """
    sums = kernel.reductions
    if not all(n.monoid is SUM and all(map(is_short, n.over)) for n in sums):
        return ()
    factors = [side for n in sums for side in children(n.body) if is_index_only(side)]
    if len(factors) != len(sums) or not all(is_op(n.body, "mul") for n in sums):
        return ()
    along = axes_in(factors) - axes_in(kernel.loads)
    found = tuple(a for a in kernel.grid if a in along and is_short(a))
    stored = all(set(found) <= s.indices[0].axes for s in kernel.stores)
    few = product(a.extent for a in found).const <= MOST_POINTS
    return found if stored and few else ()
