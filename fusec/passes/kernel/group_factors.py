"""Multiply the sums of groups of integer weights by what the groups share, on tiles of bf16 (CPU).

Spec: ``flat kernel, machine -> flat kernel``, the same values. Weights that are dequantised before
a product are rounded to bf16, or multiplied in f32. Integers are exact in bf16: each group's terms
are a product of bf16, at twice the rate or more, and its scale and zero multiply their sum.

Worked example, g groups of k terms, with a scale and a zero for each::

    y[m, n] = sum(g, k: x[m, g, k] * (f32(w[n, g, k]) * s[n, g] + z[n, g]))
    y[m, n] = sum(g: s[n, g] * sum(k: x[m, g, k] * f32(w[n, g, k])) + z[n, g] * sum(k: x[m, g, k]))
"""

from __future__ import annotations

import operator
from functools import reduce

from fusec.ir.expr import Expr, Reduce
from fusec.ir.graph import FlatKernel
from fusec.ir.machine import Machine
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import rewrite
from fusec.ir.streamed import sums_of_groups
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.unroll_rows import unrolls_rows


def factor_groups(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return the kernel with the factors of groups outside of the groups' sums."""
    if machine.bf16 == "widened" or unrolls_rows(kernel, machine):
        return kernel
    instead: dict[Expr, Expr] = {node: _by_groups(node) for node in kernel.reductions}
    if all(map(operator.is_, instead, instead.values())):
        return kernel
    made = kernel.map(lambda exprs: rewrite(exprs, lambda node: instead.get(node, node)))
    return FlatKernel(made.map(simplifier()))


def _by_groups(node: Reduce) -> Expr:
    """Return a sum by groups; the sum itself, if its operands are no such weights."""
    found = sums_of_groups(node)
    if found is None:
        return node
    # Products come first: what is added to them is computed in the loop that adds them.
    parts = sorted(found.parts.items(), key=lambda part: part[1] is found.rows)
    sums = (factor * Reduce(SUM, found.inner, term) for factor, term in parts)
    return Reduce(SUM, found.groups, reduce(operator.add, sums))
