"""Turn a sum of sums into one sum, where a GPU loads rows element by element.

Spec: ``kernel -> kernel``; same values but for the order of sums. ``sum(b: sum(i: f[b, i]))``
becomes ``sum(b, i: f[b, i])``. Sums are split for kernels of their own (``split_reduction.py``). In
one kernel with the final sum, each iteration ends in a sum over the program, at barriers, before
which elements loaded one by one wait in turn: a BatchNorm's gradient of 100x512x27x27 takes 112 us
for 207 without (model of sm_90, 2026-11-29). Sums of vectors stay: flat, they take more registers.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.expr import Expr, Reduce
from fusec.ir.graph import Kernel, kernel_nodes
from fusec.ir.machine import Machine
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import rewrite
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.schedule.access import fastest_axis
from fusec.passes.schedule.rowwise import in_vectors


def flatten_nested_sums(kernel: Kernel, machine: Machine) -> Kernel:
    """Return the kernel with sums of sums flattened, unless something else reads the inner ones."""
    inner = {part for node in kernel_nodes(kernel) if (part := _inner(node)) is not None}
    if machine.is_cpu or not inner:
        return kernel
    flat = coalesce(kernel)
    row = fastest_axis(flat, flat.inside)
    if row is None or in_vectors(flat, row):
        return kernel
    joined = kernel.map(lambda exprs: rewrite(exprs, _flat))
    left = frozenset(kernel_nodes(joined))
    labels = tuple((value, name) for value, name in joined.labels if value in left)
    return kernel if inner & left else replace(joined, labels=labels)


def _inner(node: Expr) -> Reduce | None:
    """Return the sum that a sum adds up as it is, or None."""
    match node:
        case Reduce(monoid=m, bodies=(Reduce(monoid=n) as inner,)) if m is SUM and n is SUM:
            return inner
        case _:
            return None


def _flat(node: Expr) -> Expr:
    inner = _inner(node)
    if inner is None or not isinstance(node, Reduce):
        return node
    return Reduce(SUM, (*node.over, *inner.over), *inner.bodies)
