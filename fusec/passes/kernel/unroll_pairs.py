"""Unroll an innermost axis of two, so that lanes run along the axis of the pairs (CPU).

Spec: ``flat kernel -> flat kernel``, the same values. Two elements do not fill a vector, and where
they are computed differently (the parts of a complex number, features that are rotated in pairs)
the axis does not merge with the one around it. So each store becomes two, side by side in memory:
loads and stores of pairs are then vectors, shuffled apart and together (``codegen/cpp/pairs.py``).

Worked example, a complex product::

    z[2*i + p] = where(p < 1, a[2*i]*b[2*i] - a[2*i + 1]*b[2*i + 1], ...)    grid i:N p:2
    z[2*i] = a[2*i]*b[2*i] - ...;  z[2*i + 1] = a[2*i]*b[2*i + 1] + ...      grid i:N
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.expr import Reduce, substitute
from fusec.ir.graph import FlatKernel, Store, kernel_nodes
from fusec.ir.index import Axis, index
from fusec.passes.graph.simplify import simplifier

_TWO = index(2)


def unroll_pairs(kernel: FlatKernel) -> FlatKernel:
    """Return the kernel with an axis of pairs unrolled into stores, if it has one."""
    axis = next((axis for axis in kernel.axes if _is_of_pairs(kernel, axis)), None)
    if axis is None:
        return kernel
    simplify = simplifier()
    stores: list[Store] = []
    for store in kernel.stores:
        for which in range(2 if axis in store.indices[0].axes else 1):
            at = {axis: index(which)}
            (expr,) = simplify((store.expr.substitute(at),))
            stores.append(Store(store.buffer, (substitute(store.indices[0], at),), expr))
    grid, inside = (
        tuple(a for a in axes if a is not axis) for axes in (kernel.grid, kernel.inside)
    )
    return FlatKernel(replace(kernel, grid=grid, inside=inside, stores=tuple(stores), labels=()))


def _is_of_pairs(kernel: FlatKernel, axis: Axis) -> bool:
    """Return True for an axis of two along which stores are contiguous, and two apart along others.

    No reduction is over it.
    """
    if axis.extent is not _TWO or axis.limit is not None:
        return False
    offsets = [s.indices[0] for s in kernel.stores if axis in s.indices[0].axes]
    if not offsets or not all(offset.steps_by_one(axis) for offset in offsets):
        return False
    if any(isinstance(n, Reduce) and axis in n.over for n in kernel_nodes(kernel)):
        return False
    return all(any(o.coefficient(other) is _TWO for other in o.axes) for o in offsets)
