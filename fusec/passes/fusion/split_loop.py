"""Split the loop of a kernel with products over several programs (split-K), with a final kernel.

Spec: ``kernel, machine -> (partial kernel, final kernel) or None``. Where a product has fewer tiles
than the processor has room for, and sums over a long axis n, that axis becomes parts p of R terms
i, if by the cost model it outweighs a second kernel. The partial kernel stores the sum of each
part, in the accumulators' type; the final one sums over parts and computes everything else. Parts
depend on shapes and target only, never on threads or timing, so that these sums, not those that
follow, have the same order in each run.

Where some products of a GPU's kernel sum along one axis and others along another, as the gradients
of an attention do, programs for tiles of the one add their parts of the others to memory, which
begins as zeros (``Store.adds``). Their order is that in which programs get there::

    dq[m, d] = sum(n: ds * k)       a[m, d] += sum(n: ds * k);     dq[m, d] = a[m, d]
    dk[n, d] = sum(m: ds * q)       dk[n, d] = sum(m: ds * q)

A sum relative to a maximum (``ir/online.py``) uses its part's own maximum, and is rescaled to the
maximum of all parts. A part whose scores are all -inf contributes 0 if another part has others::

    y[m] = sum(n: a[m, n])          a[p, m] = sum(i: a[m, p*R + i]);   y[m] = sum(p: a[p, m])
    l    = sum(n: exp(s - m) * w)   l[p] = sum(i: exp(s - m[p]) * w);  m[p] = max(i: s)
                                    l = sum(p: l[p] * exp(m[p] - m));  m = max(p: m[p])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from fusec.ir.combine import AxisSplit, rfactor
from fusec.ir.expr import Buffer, Expr, Load, Reduce, axes_in, postorder, reductions
from fusec.ir.graph import Kernel, Schedule, Store, axes_of, kernel_nodes
from fusec.ir.index import Axis, index
from fusec.ir.machine import Machine
from fusec.ir.online import find_row_maxima, merged, scale_of
from fusec.ir.rewrite import replace_nodes
from fusec.passes.fusion.cost import kernel_cost
from fusec.passes.graph.rfactor import cut_axis
from fusec.passes.kernel.online_softmax import online_softmax
from fusec.passes.schedule.contraction import added_sums, takes_wide_steps

States: TypeAlias = dict[Reduce, tuple[Reduce, ...]]
"""Reduction -> the state of each part."""
SplitKernel: TypeAlias = Callable[[Kernel], tuple[Kernel, Kernel] | None]
"""A target's function that splits a kernel or returns None: ``split_loop`` on GPUs."""


def split_loops(schedule: Schedule, split: SplitKernel) -> Schedule:
    """Return the schedule with each kernel that ``split`` accepts replaced by two kernels."""
    return schedule.map_kernels(lambda kernel: split(kernel) or (kernel,))


def split_loop(kernel: Kernel, machine: Machine) -> tuple[Kernel, Kernel] | None:
    """Return the kernel as a partial and a final one, or None where one kernel is faster."""
    if added := added_sums(kernel, machine):
        return _adding(kernel, added, in_turn=not takes_wide_steps(kernel, machine))
    kernel = online_softmax(kernel)
    spread = kernel_cost(kernel, machine).spread
    if spread is None or spread.axis is None:
        return None
    beside = _beside(kernel, spread.axis)
    if beside is None:
        return None
    cut = cut_axis(spread.axis, spread.terms)
    states: States = {}
    for node, row_max in beside.items():  # in postorder: a maximum before the sums that use it
        own = node
        if row_max is not None:  # relative to the part's own maximum
            (body,) = replace_nodes((node.body,), {row_max: states[row_max][0]})
            own = Reduce(node.monoid, node.over, body)
        states[node] = rfactor(own, cut)
    partial = _partial(kernel, states, cut)
    return partial, _final(kernel, beside, states, partial, cut)


def _adding(kernel: Kernel, added: tuple[Reduce, ...], *, in_turn: bool) -> tuple[Kernel, Kernel]:
    """Return the kernel whose programs add some sums to memory, and what is computed from them.

    Args:
        in_turn: sums of fewer values come first, for registers keep what the next ones multiply in
            16 bits (else 16 bytes spill; with wide steps 176 do; sm_90, Triton 3.7.1, 2026-11).
    """
    follow = tuple(s for s in kernel.stores if not set(added).isdisjoint(postorder((s.expr,))))
    others = (s for s in kernel.stores if s not in follow)
    stores = sorted(others, key=lambda s: len(postorder((s.expr,))) if in_turn else 0)
    loaded: dict[Expr, Expr] = {}
    for node, name in _names(kernel, {node: (node,) for node in added}).items():
        own = tuple(a for a in kernel.axes if a in node.axes)
        buffer = Buffer.row_major(name, tuple(a.extent for a in own), node.dtype)
        stores.append(Store(buffer, tuple(map(index, own)), node, adds=True))
        loaded[node] = Load(buffer, stores[-1].indices)
    made = tuple(s.buffer for s in follow)
    rest = tuple(b for b in kernel.defs if b not in made)
    first = replace(kernel, name=f"{kernel.name}_part", stores=tuple(stores), defs=rest)
    final = replace(kernel, stores=follow, inside=(), defs=made)
    final = final.map(lambda roots: replace_nodes(roots, loaded))
    used = axes_of(final.stores)
    final = replace(final, grid=tuple(a for a in kernel.axes if a in used))
    return _labelled(first), _labelled(final)


def _labelled(kernel: Kernel) -> Kernel:
    """Return a kernel with the labels of its own values alone."""
    nodes = set(kernel_nodes(kernel))
    return replace(kernel, labels=tuple((e, name) for e, name in kernel.labels if e in nodes))


def _beside(kernel: Kernel, axis: Axis) -> dict[Reduce, Reduce | None] | None:
    """Return each reduction over an axis with its maximum, if any; None if the loop cannot split.

    A reduction can be split if its body contains no other reduction over the axis than its
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


def _partial(kernel: Kernel, states: States, cut: AxisSplit) -> Kernel:
    """Return the kernel that stores the partial results, each value once, part axis first."""
    stores: list[Store] = []
    for found, name in _names(kernel, states).items():
        own = (cut.part, *(a for a in kernel.axes if a in found.axes))
        buffer = Buffer.row_major(name, tuple(a.extent for a in own), found.dtype)
        stores.append(Store(buffer, tuple(map(index, own)), found))
    used = axes_of(stores)
    grid = (cut.part, *(a for a in kernel.grid if a in used))
    inside = tuple(a for a in cut.inside(kernel.inside) if a in used)
    return Kernel(f"{kernel.name}_part", grid, inside, tuple(stores), kernel.origin)


def _names(kernel: Kernel, states: States) -> dict[Reduce, str]:
    """Return partial result -> unique buffer name, from the reduction's label or the kernel."""
    labels, first = dict(kernel.labels), kernel.stores[0].buffer.name
    names: dict[Reduce, str] = {}
    for node, state in states.items():
        for found in state:
            name = f"{labels.get(node, first)}_{found.monoid}_part"
            same = sum(other.startswith(name) for other in names.values())
            names.setdefault(found, f"{name}_{same + 1}" if same else name)
    return names


# -- the final kernel ------------------------------------------------------------------------------


def _final(
    kernel: Kernel,
    beside: dict[Reduce, Reduce | None],
    states: States,
    partial: Kernel,
    cut: AxisSplit,
) -> Kernel:
    """Return the kernel that combines the parts and computes the stores of the original kernel."""
    part = Axis(cut.part.name, cut.part.extent)
    loaded = {s.expr: Load(s.buffer, (index(part), *s.indices[1:])) for s in partial.stores}
    total: dict[Expr, Expr] = {}
    for node, row_max in beside.items():
        bodies: list[Expr] = [loaded[found] for found in states[node]]
        if row_max is not None:
            (found,), (top,) = bodies, states[row_max]
            bodies = [merged(found, scale_of(node, row_max), loaded[top], total[row_max])]
        total[node] = Reduce(node.monoid, (part,), *bodies)
    final = kernel.map(lambda roots: replace_nodes(roots, total))
    used = axes_of(final.stores)
    inside = {a for s in final.stores for n in reductions(s.expr) for a in n.over}
    inside |= {a for a in kernel.inside if not all(a in axes_in(s.indices) for s in final.stores)}
    return replace(
        final,
        grid=tuple(a for a in kernel.axes if a in used and a not in inside),
        inside=tuple(a for a in (part, *kernel.inside) if a in used and a in inside),
        labels=tuple((e, name) for e, name in final.labels if e.axes.isdisjoint(cut.value)),
    )
