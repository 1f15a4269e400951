"""Split the loop of a kernel with products over several programs, and add up what they find.

Spec: ``kernel, machine -> (partial kernel, final kernel) or None``. Where a product has fewer tiles
than the processor has room for, and sums over a long axis n, that axis becomes parts p of R terms
i, if the model says that it pays for a second kernel. The partial kernel stores what each part sums
to, in the accumulators' type; the final one sums over parts and computes all the rest. Parts follow
from shapes and target alone, never from threads or timing, so that results are the same each time.

A sum beside a maximum (``ir/online.py``) refers to its part's own maximum, and is multiplied by
what that lacks. A part whose scores are all -inf counts nothing, beside one with others::

    y[m] = sum(n: a[m, n])          a[p, m] = sum(i: a[m, p*R + i]);   y[m] = sum(p: a[p, m])
    l    = sum(n: exp(s - m) * w)   l[p] = sum(i: exp(s - m[p]) * w);  m[p] = max(i: s)
                                    l = sum(p: l[p] * exp(m[p] - m));  m = max(p: m[p])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from fusec.ir.combine import Parts, rfactor
from fusec.ir.expr import Buffer, Const, Expr, Load, Op, Reduce, Select, postorder, reductions
from fusec.ir.graph import Kernel, Schedule, Store, axes_of
from fusec.ir.index import Axis, index
from fusec.ir.online import find_row_maxima, scale_of, scaled
from fusec.ir.rewrite import Rewriter, around_reductions, rewrite
from fusec.passes.fusion.cost import price
from fusec.passes.graph.rfactor import AxisSplit, cut_axis
from fusec.passes.kernel.online_softmax import online_softmax
from fusec.passes.machine import Machine

SplitKernel: TypeAlias = Callable[[Kernel], tuple[Kernel, Kernel] | None]
"""A target's way to divide a kernel, if it has one: what ``split_loop`` is to GPUs."""


def split_loops(schedule: Schedule, split: SplitKernel) -> Schedule:
    """Return the schedule with the kernels that ``split`` divides in two steps each."""
    return schedule.map_kernels(lambda kernel: split(kernel) or (kernel,))


def split_loop(kernel: Kernel, machine: Machine) -> tuple[Kernel, Kernel] | None:
    """Return the kernel as a partial and a final one, or None where one kernel does better."""
    kernel = online_softmax(kernel)
    spread = price(kernel, machine).spread
    if spread is None or spread.axis is None:
        return None
    beside = _beside(kernel, spread.axis)
    if beside is None:
        return None
    cut = cut_axis(spread.axis, spread.terms)
    states: dict[Reduce, Parts] = {}
    for node, row_max in beside.items():  # a maximum stands before the sums that refer to it
        states[node] = _within_part(node, row_max, cut, states)
    partial = _partial(kernel, states, cut)
    return partial, _final(kernel, beside, states, partial, cut)


def _beside(kernel: Kernel, axis: Axis) -> dict[Reduce, Reduce | None] | None:
    """Return the reductions over an axis with the maxima they refer to; None if one needs more.

    A reduction has a partial form of its own if it needs no other one over the axis but its
    maximum.
    """
    roots = [store.expr for store in kernel.stores]
    found = [n for n in postorder(roots) if isinstance(n, Reduce) and axis in n.over]
    row_maxima = find_row_maxima(roots)
    beside: dict[Reduce, Reduce | None] = {}
    for node in found:
        row_max = row_maxima.get(node)
        below = {n for n in postorder(node.bodies) if n in found}
        same_type = row_max is None or row_max.dtype is node.dtype
        if below - {row_max} or not same_type:
            return None
        beside[node] = row_max
    return beside


# -- the partial kernel ----------------------------------------------------------------------------


def _partial(kernel: Kernel, states: dict[Reduce, Parts], cut: AxisSplit) -> Kernel:
    """Return the kernel that stores what parts find, each value once, the part axis first."""
    stores: list[Store] = []
    for found, name in _names(kernel, states).items():
        own = tuple(a for a in kernel.axes if a in found.axes)
        shape = tuple(a.extent for a in (cut.part, *own))
        buffer = Buffer.row_major(name, shape, found.dtype)
        stores.append(Store(buffer, tuple(index(a) for a in (cut.part, *own)), found))
    used = axes_of(stores)
    grid = (cut.part, *(a for a in kernel.grid if a in used))
    inside = cut.inside(kernel.inside)
    return Kernel(
        f"{kernel.name}_part",
        grid,
        tuple(a for a in inside if a in used),
        tuple(stores),
        kernel.origin,
    )


def _names(kernel: Kernel, states: dict[Reduce, Parts]) -> dict[Reduce, str]:
    """Return a name of its own for what parts find of a reduction: its label's, or the kernel's."""
    labels, first = dict(kernel.labels), kernel.stores[0].buffer.name
    names: dict[Reduce, str] = {}
    for node, state in states.items():
        for found in state:
            name = f"{labels.get(node, first)}_{found.monoid}_part"
            same = sum(other.startswith(name) for other in names.values())
            names.setdefault(found, f"{name}_{same + 1}" if same else name)
    return names


def _within_part(
    node: Reduce, row_max: Reduce | None, cut: AxisSplit, states: dict[Reduce, Parts]
) -> Parts:
    """Return what one part of a reduction finds, which refers to that part's maximum alone."""
    over = cut.inside(node.over)
    if row_max is None:
        return rfactor(node, cut.value, over)
    body = around_reductions(node.body, lambda n: n is row_max, lambda e: e.substitute(cut.value))
    (top,) = states[row_max]
    (body,) = rewrite((body,), lambda n: top if n is row_max else n)
    return (Reduce(node.monoid, over, body),)


# -- the final kernel ------------------------------------------------------------------------------


def _final(
    kernel: Kernel,
    beside: dict[Reduce, Reduce | None],
    states: dict[Reduce, Parts],
    partial: Kernel,
    cut: AxisSplit,
) -> Kernel:
    """Return the kernel that combines parts and computes what the whole kernel stores."""
    part = Axis(cut.part.name, cut.part.extent)
    loaded = {s.expr: Load(s.buffer, (index(part), *s.indices[1:])) for s in partial.stores}
    total: dict[Expr, Expr] = {}
    for node, row_max in beside.items():
        bodies: tuple[Expr, ...] = tuple(loaded[found] for found in states[node])
        if row_max is not None:
            (found,), (top,) = states[node], states[row_max]
            sums = loaded[found], loaded[top]
            bodies = (_corrected(node, row_max, *sums, total[row_max]),)
        total[node] = Reduce(node.monoid, (part,), *bodies)
    final = kernel.map(lambda exprs: _with_totals(exprs, total))
    used = axes_of(final.stores)
    inside = {a for s in final.stores for n in reductions(s.expr) for a in n.over}
    inside |= {a for a in kernel.inside if not all(a in _written(s) for s in final.stores)}
    return replace(
        final,
        grid=tuple(a for a in kernel.axes if a in used and a not in inside),
        inside=tuple(a for a in (part, *kernel.inside) if a in used and a in inside),
        labels=tuple((e, name) for e, name in final.labels if e.axes.isdisjoint(cut.value)),
    )


def _corrected(node: Reduce, row_max: Reduce, found: Expr, top: Expr, maximum: Expr) -> Expr:
    """Return a part's sum, beside its maximum ``top``, as it would be beside that of all parts.

    A part without a score above -inf counts nothing, unless the whole row has none: that is NaN.
    """
    lowest = Const(-math.inf, top.dtype)
    nothing = Op("and", (Op("eq", (top, lowest)), Op("gt", (maximum, lowest))))
    power = scaled(Op("sub", (top, maximum)), scale_of(node, row_max))
    return Select(nothing, Const(0, node.dtype), Op("mul", (found, Op("exp", (power,)))))


def _with_totals(roots: tuple[Expr, ...], total: dict[Expr, Expr]) -> tuple[Expr, ...]:
    """Return expressions with the outermost reductions over the looped axis replaced."""
    outside = Rewriter(lambda node: node)
    outside.new.update(total)  # what is known is not looked into
    return outside(roots)


def _written(store: Store) -> frozenset[Axis]:
    return frozenset(a for position in store.indices for a in position.axes)
