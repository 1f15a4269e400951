"""Multiply the sums of groups of integer weights by what the groups share, on tiles of bf16 (CPU).

Spec: ``flat kernel, machine -> flat kernel``, the same values. Weights that are dequantised before
a product are rounded to bf16, or multiplied in f32. Integers are exact in bf16: each group's terms
are a product of bf16, at twice the rate or more, and its scale and zero multiply their sum.

Worked example, g groups of k terms, with a scale and a zero for each::

    y[m, n] = sum(g, k: x[m, g, k] * (f32(w[n, g, k]) * s[n, g] + z[n, g]))
    y[m, n] = sum(g: s[n, g] * sum(k: x[m, g, k] * f32(w[n, g, k])) + z[n, g] * sum(k: x[m, g, k]))

Of two weights in a byte each has a product of its own, with every other element of the rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from fusec.ir.expr import Expr, Op, Reduce, reductions, substitute_all
from fusec.ir.graph import FlatKernel, Kernel
from fusec.ir.index import Axis, index
from fusec.ir.machine import Machine
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import rewrite
from fusec.ir.streamed import sums_of_groups
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.unroll import points
from fusec.passes.kernel.unroll_rows import unrolls_rows


def factor_groups(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return the kernel with the factors of groups outside of the groups' sums."""
    if machine.bf16 == "widened" or unrolls_rows(kernel, machine):
        return kernel
    instead: dict[Expr, Expr] = {node: _by_groups(node) for node in kernel.reductions}
    if all(map(operator.is_, instead, instead.values())):
        return kernel
    made = kernel.map(lambda exprs: rewrite(exprs, lambda node: instead.get(node, node)))
    made = made.map(simplifier())
    unrolled = _summed(kernel) - _summed(made)
    return FlatKernel(replace(made, inside=tuple(a for a in made.inside if a not in unrolled)))


def _summed(kernel: Kernel) -> set[Axis]:
    return {axis for node in kernel.reductions for axis in node.over}


def _by_groups(node: Reduce) -> Expr:
    """Return a sum by groups; the sum itself, if its operands are no such weights."""
    found = sums_of_groups(node)
    if found is None:
        return node
    pairs = tuple(axis for axis in found.inner if axis.extent is index(2))
    rest = tuple(axis for axis in found.inner if axis not in pairs)
    if len(rest) != 1 or len(pairs) > 1:
        return node

    def summed(term: Expr) -> Expr:
        # Sums that rows are computed from, such as a norm's, run over the same axes, whole.
        whole: dict[Expr, Expr] = {n: n for n in reductions(term) if n.axes.isdisjoint(pairs)}
        places = [substitute_all((term,), at, whole)[0] for at in points(pairs)]
        return _added([Reduce(SUM, rest, place) for place in places])

    parts = [Op("mul", (factor, summed(term))) for factor, term in found.parts.items()]
    return Reduce(SUM, found.groups, _added(parts))


def _added(values: Sequence[Expr]) -> Expr:
    return reduce(lambda a, b: Op("add", (a, b)), values)
