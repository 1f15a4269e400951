"""Unroll an innermost axis of two, so that lanes run along the axis of the pairs (CPU).

Spec: ``flat kernel -> flat kernel``, the same values. Two elements do not fill a vector, and where
they are computed differently (the parts of a complex number, features that are rotated in pairs)
the axis does not merge with the one around it. So each store becomes two, side by side in memory:
loads and stores of pairs are then vectors, shuffled apart and together (``codegen/cpp/pairs.py``).

Worked example, a complex product::

    z[2*i + p] = where(p < 1, a[2*i]*b[2*i] - a[2*i + 1]*b[2*i + 1], ...)    grid i:N p:2
    z[2*i] = a[2*i]*b[2*i] - ...;  z[2*i + 1] = a[2*i]*b[2*i + 1] + ...      grid i:N

Likewise a sum over pairs, each of a byte with two weights, becomes the sum of two terms::

    y[n] = sum(k, p: x[2*k + p] * f32(where(p < 1, w[n, k] & 15, w[n, k] >> 4)))
    y[n] = sum(k: x[2*k] * f32(w[n, k] & 15) + x[2*k + 1] * f32(w[n, k] >> 4))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.ir.contraction import factors
from fusec.ir.expr import Reduce, loads
from fusec.ir.graph import FlatKernel
from fusec.ir.index import Axis, index
from fusec.ir.machine import Machine
from fusec.ir.monoid import SUM
from fusec.ir.serial import serial_axes
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.unroll import added_up, placed, points, unrolled
from fusec.passes.kernel.unroll_rows import unrolls_rows

_TWO = index(2)


def unroll_pairs(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return the kernel with an axis of pairs unrolled into stores, or into terms of its sums."""
    kernel = _unroll_sums(kernel, machine)
    axis = next((axis for axis in kernel.axes if _is_apart(kernel, axis)), None)
    if axis is None:
        return kernel
    first, second = points((axis,))
    simplify, stores = simplifier(), []
    for store in kernel.stores:
        both = (first, second) if axis in store.indices[0].axes else (first,)
        stores += [placed(store, at, simplify) for at in both]
    return unrolled(kernel, {axis: ()}, stores)


def _unroll_sums(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return the kernel with sums over an axis of pairs unrolled, where lanes may run across it.

    Products that run as tiles stay as they are.
    """
    sums = kernel.reductions
    paired = {axis for axis in kernel.inside if _is_summed(kernel, axis, sums)}
    tiles = any(factors(n) is not None for n in sums) and not unrolls_rows(kernel, machine)
    if not paired or tiles:
        return kernel
    apart = added_up(kernel, {a: ([*points((a,))], ()) for a in paired}).map(simplifier())
    return FlatKernel(replace(apart, inside=tuple(a for a in kernel.inside if a not in paired)))


def _is_summed(kernel: FlatKernel, axis: Axis, sums: Sequence[Reduce]) -> bool:
    """Return True for an axis of pairs along which nothing is stored, and all that it has is added
    up, along other axes as well."""
    if axis.extent is not _TWO or axis.limit is not None or axis in serial_axes(sums):
        return False
    found = [n for n in sums if axis in n.over]
    stored = any(axis in store.indices[0].axes for store in kernel.stores)
    across = any(len(n.over) > 1 for n in found)
    return across and not stored and all(n.monoid is SUM and _walks_pairs(n, axis) for n in found)


def _walks_pairs(node: Reduce, axis: Axis) -> bool:
    """Return True if a sum's loads that vary along an axis of pairs are two apart along others."""
    offsets = [load.indices[0] for load in loads(node.bodies) if axis in load.axes]
    return bool(offsets) and all(
        o.steps_by_one(axis) and any(o.coefficient(a) is _TWO for a in node.over) for o in offsets
    )


def _is_apart(kernel: FlatKernel, axis: Axis) -> bool:
    """Return True for an axis of pairs over which, and along which, there is no reduction."""
    sums = kernel.reductions
    reduced = axis in serial_axes(sums) or any(axis in n.over for n in sums)
    return is_of_pairs(kernel, axis) and not reduced


def is_of_pairs(kernel: FlatKernel, axis: Axis) -> bool:
    """Return True for an axis of two, along which stores are contiguous, and others two apart."""
    if axis.extent is not _TWO or axis.limit is not None:
        return False
    offsets = [s.indices[0] for s in kernel.stores if axis in s.indices[0].axes]
    if not offsets or not all(offset.steps_by_one(axis) for offset in offsets):
        return False
    return all(any(o.coefficient(other) is _TWO for other in o.axes) for o in offsets)
