"""Run scans in the loop that they scan along.

Spec: ``kernel -> kernel``, the same values. A reduction over the points up to each along an axis
(``ir/serial.py``) becomes a ``Scan``, which takes a step for each point. Worked example, where the
axis j disappears::

    y[m, i] = sum(j: where(until(j, i), x[m, j], 0))     becomes     y[m, i] = sum_scan(i: x[m, i])

Where scans run backwards along an axis of n points, all that the kernel does turns around::

    y[i] = sum(j: where(until(i, j), x[j], 0))  becomes  y[n - 1 - i] = sum_scan(i: x[n - 1 - i])

A kernel stays as it is if some scans run forwards along an axis, and others backwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusec.errors import InternalError
from fusec.ir.expr import Expr, Op, Reduce, axes_in, postorder, substitute
from fusec.ir.graph import Kernel, Store, axes_of, kernel_nodes
from fusec.ir.index import Axis, index
from fusec.ir.rewrite import rewrite
from fusec.ir.serial import runs_backwards, scan_of, turned


def run_scans(kernel: Kernel) -> Kernel:
    """Return the kernel with its scans as ``Scan``s."""
    groups = _groups(kernel.reductions)
    if not groups:
        return kernel
    rewritten = _in_one_loop(kernel.map(lambda exprs: rewrite(exprs, _run)), groups)
    backwards = {axis: turned(axis) for axes, is_turned in groups if is_turned for axis in axes}
    if backwards:
        rewritten = rewritten.substitute(backwards)
    used = axes_of(rewritten.stores)
    bound = (a for n in rewritten.reductions for a in n.over)
    inside = dict.fromkeys((*(a for a in rewritten.inside if a in used), *bound))
    return replace(rewritten, inside=tuple(inside))


def _groups(nodes: Iterable[Reduce]) -> list[tuple[set[Axis], bool]]:
    """Return the axes of scans of each other, and whether these run backwards.

    A scan of a scan runs along an axis that the outer one reduces: both take one step for each
    point. None where some run forwards and others backwards along one.
    """
    known: list[tuple[set[Axis], bool]] = []
    for node in nodes:
        if (scan := scan_of(node)) is None:
            continue
        axes, backwards = {*node.over, *scan.over}, runs_backwards(node)
        for group in [group for group in known if not axes.isdisjoint(group[0])]:
            if group[1] is not backwards:
                return []
            known.remove(group)
            axes |= group[0]
        known.append((axes, backwards))
    return known


def _in_one_loop(kernel: Kernel, groups: list[tuple[set[Axis], bool]]) -> Kernel:
    """Return the kernel with what it stores along axes of scans of each other stored along one.

    In ``y[j] = x_scan(j)`` and ``z[i] = sum_scan(i: x_scan(i))``, where the scan of z read y along
    j, both take one step for each i.
    """
    stored = axes_in(at for store in kernel.stores for at in store.indices)
    order = {axis: k for k, axis in enumerate(a for a in kernel.axes if a in stored)}
    ends: dict[Axis, Axis] = {}
    for axes, _ in groups:
        end = min(axes, key=lambda axis: (order.get(axis, len(order)), axis.serial))
        ends |= dict.fromkeys(axes, end)

    def moved(store: Store) -> Store:
        here = axes_in(store.indices)
        places = {axis: ends[axis] for axis in here if ends.get(axis, axis) is not axis}
        reduced = {a for n in postorder((store.expr,)) if isinstance(n, Reduce) for a in n.over}
        taken = reduced | here | store.expr.axes
        if len(places) != 1 or reduced & places.keys() or taken & {*places.values()}:
            return store
        mapping = {axis: index(end) for axis, end in places.items()}
        at = tuple(substitute(each, mapping) for each in store.indices)
        return replace(store, indices=at, expr=store.expr.substitute(mapping))

    return replace(kernel, stores=tuple(map(moved, kernel.stores)))


def check_order(kernel: Kernel) -> Kernel:
    """Return a kernel whose scans run; no loop would combine the points of another one in order.

    Raises:
        InternalError: for an ordered reduction that runs backwards and is no scan.
    """
    for node in kernel_nodes(kernel):
        if isinstance(node, Reduce) and node.monoid.ordered and _is_reversed(node):
            raise InternalError(f"{node} is no scan", stage="scans")
    return kernel


def _is_reversed(node: Reduce) -> bool:
    """Return True if a reduction takes the points behind each, the last one first."""
    asked = (n for n in postorder(node.bodies) if isinstance(n, Op) and n.name == "until")
    return any(not n.args[1].axes.isdisjoint(node.over) for n in asked)


def _run(node: Expr) -> Expr:
    return (isinstance(node, Reduce) and scan_of(node)) or node
