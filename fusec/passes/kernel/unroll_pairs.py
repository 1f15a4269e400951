"""Unroll an axis of two, or join it with that of the pairs: lanes run along both (CPU).

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

Halves of a byte may be weights of two columns. A product in tiles becomes two, which share bytes::

    y[m, N*p + n] = sum(k: x[m, k] * f32(where(p < 1, w[k, n] & 15, w[k, n] >> 4)))
    y[m, n] = sum(k: x[m, k] * f32(w[k, n] & 15));  y[m, N + n] = ... w[k, n] >> 4 ...

A product that runs as tiles sums along one axis. So the two are joined there: a tile's lanes run
along whole rows, and its weights are stored in pairs (``codegen/cpp/vector_nest.py``)::

    y[m, n] = sum(t: x[m, t] * f32(where(t%2 < 1, w[n, t//2] & 15, w[n, t//2] >> 4)))
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import reduce

from fusec.ir.contraction import factors
from fusec.ir.dtype import I8, I32, U8
from fusec.ir.expr import (
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    loads,
    postorder,
    substitute_all,
)
from fusec.ir.graph import FlatKernel
from fusec.ir.index import Axis, floordiv, index, mod
from fusec.ir.machine import Machine
from fusec.ir.monoid import SUM
from fusec.ir.rewrite import Normalizer, rewrite
from fusec.ir.serial import serial_axes
from fusec.passes.graph.simplify import simplifier
from fusec.passes.kernel.unroll import added_up, placed, points, unrolled
from fusec.passes.kernel.unroll_rows import unrolls_rows
from fusec.passes.schedule import contraction

_TWO = index(2)


def unroll_pairs(kernel: FlatKernel, machine: Machine) -> FlatKernel:
    """Return the kernel with an axis of pairs unrolled into stores, or into terms of its sums."""
    kernel = _unroll_sums(kernel, machine)
    axis = next((axis for axis in kernel.axes if _is_apart(kernel, axis)), None)
    if axis is None:
        axis = next((axis for axis in kernel.grid if _is_of_halves(kernel, axis, machine)), None)
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

    Of products that run as tiles the axes are joined.
    """
    sums = kernel.reductions
    paired = {axis for axis in kernel.inside if _is_summed(kernel, axis, sums)}
    if not paired:
        return kernel
    if any(factors(n) is not None for n in sums) and not unrolls_rows(kernel, machine):
        joined = _join_sums(kernel, paired, machine)
        if contraction.accepts(joined, machine):
            return joined
    apart = added_up(kernel, {a: ([*points((a,))], ()) for a in paired}).map(simplifier())
    return FlatKernel(replace(apart, inside=tuple(a for a in kernel.inside if a not in paired)))


def _join_sums(kernel: FlatKernel, paired: AbstractSet[Axis], machine: Machine) -> FlatKernel:
    """Return the kernel with an axis of pairs of its products joined with the one around it.

    Only axes of whole vectors of bytes are joined: elsewhere lanes would read bytes one by one.
    """
    joined: dict[tuple[Axis, Axis], Axis] = {}
    simplify = simplifier()

    def rule(node: Expr) -> Expr:
        if not isinstance(node, Reduce) or paired.isdisjoint(node.over):
            return node
        pair = next(axis for axis in node.over if axis in paired)
        around = _around(node, pair)
        if around is None or mod(around.extent, index(machine.vector)) is not index(0):
            return node
        terms = joined.setdefault((around, pair), Axis(around.name, around.extent * 2))
        body = _joined_terms(node.body, around, pair, terms, simplify)
        if body is None:
            return node
        return Reduce(SUM, (*(a for a in node.over if a not in (around, pair)), terms), body)

    made = kernel.map(lambda roots: rewrite(roots, rule)).map(simplify)
    before, after = ({axis for node in k.reductions for axis in node.over} for k in (kernel, made))
    kept = (axis for axis in kernel.inside if axis not in before - after)
    new = (axis for axis in joined.values() if axis in after)
    return FlatKernel(replace(made, inside=(*kept, *new)))


def _joined_terms(
    body: Expr, around: Axis, pair: Axis, terms: Axis, simplify: Normalizer
) -> Expr | None:
    """Return the terms of a sum along an axis that takes the place of two, or None.

    A factor may load elements, which vary along the pair, or bytes, which do not: then it is a
    choice between the factors of a byte's halves. A factor with both kinds of loads has no such
    form. Sums in a factor, as those of a norm, run over the same axes, and stay as they are.
    """
    at = {around: floordiv(index(terms), index(2)), pair: mod(index(terms), index(2))}
    made: list[Expr] = []
    for factor in body.args if isinstance(body, Op) and body.name == "mul" else (body,):
        nodes = postorder((factor,))
        kept: dict[Expr, Expr] = {n: n for n in nodes if n.axes.isdisjoint((around, pair))}
        kinds = {pair in n.axes for n in nodes if isinstance(n, Load) and n not in kept}
        if len(kinds) > 1:
            return None
        if pair in factor.axes and True not in kinds:
            halves = [{around: at[around], pair: index(p)} for p in range(2)]
            low, high = (simplify(substitute_all((factor,), half, kept))[0] for half in halves)
            first = Op("lt", (IndexValue(at[pair], I32), IndexValue(index(1), I32)))
            made.append(Select(first, low, high))
        else:
            made += substitute_all((factor,), at, kept)
    return reduce(operator.mul, made)


def _is_summed(kernel: FlatKernel, axis: Axis, sums: Sequence[Reduce]) -> bool:
    """Return True for an axis of pairs along which nothing is stored, and all that it has is added
    up, along other axes as well."""
    if axis.extent is not _TWO or axis.limit is not None or axis in serial_axes(sums):
        return False
    found = [n for n in sums if axis in n.over]
    stored = any(axis in store.indices[0].axes for store in kernel.stores)
    across = any(len(n.over) > 1 for n in found)
    return across and not stored and all(n.monoid is SUM and _around(n, axis) for n in found)


def _around(node: Reduce, pair: Axis) -> Axis | None:
    """Return the summed axis along which loads that vary along an axis of pairs are two apart."""
    offsets = [load.indices[0] for load in loads(node.bodies) if pair in load.axes]
    if not offsets or not all(offset.steps_by_one(pair) for offset in offsets):
        return None
    return next((a for a in node.over if all(o.coefficient(a) is _TWO for o in offsets)), None)


def _is_apart(kernel: FlatKernel, axis: Axis) -> bool:
    """Return True for an axis of pairs over which, and along which, there is no reduction."""
    sums = kernel.reductions
    reduced = axis in serial_axes(sums) or any(axis in n.over for n in sums)
    return is_of_pairs(kernel, axis) and not reduced


def _is_of_halves(kernel: FlatKernel, axis: Axis, machine: Machine) -> bool:
    """Return True for an axis of two along which products in tiles read the same bytes of weights.

    Its stores are a known distance apart, so that they are seen to be.
    """
    if axis.extent is not _TWO or axis.limit is not None or unrolls_rows(kernel, machine):
        return False
    steps = [store.indices[0].coefficient(axis) for store in kernel.stores]
    if not all(step is not None and step.is_constant for step in steps):
        return False
    found = [n for n in kernel.reductions if factors(n) is not None and axis in n.axes]
    narrow = [n for node in found for n in loads(node.bodies) if n.dtype in (I8, U8)]
    return bool(narrow) and all(axis not in n.axes for n in narrow)


def is_of_pairs(kernel: FlatKernel, axis: Axis) -> bool:
    """Return True for an axis of two, along which stores are contiguous, and others two apart."""
    if axis.extent is not _TWO or axis.limit is not None:
        return False
    offsets = [s.indices[0] for s in kernel.stores if axis in s.indices[0].axes]
    if not offsets or not all(offset.steps_by_one(axis) for offset in offsets):
        return False
    return all(any(o.coefficient(other) is _TWO for other in o.axes) for o in offsets)
