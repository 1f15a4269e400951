"""Run scans in the loop that they scan along.

Spec: ``kernel -> kernel``, the same values. A reduction over the points up to each along an axis
(``ir/serial.py``) becomes a ``Scan``, which takes a step for each point. Worked example, where the
axis j disappears::

    y[m, i] = sum(j: where(until(j, i), x[m, j], 0))     becomes     y[m, i] = sum_scan(i: x[m, i])
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.expr import Expr, Reduce
from fusec.ir.graph import Kernel, axes_of, kernel_nodes
from fusec.ir.rewrite import rewrite
from fusec.ir.serial import scan_of


def run_scans(kernel: Kernel) -> Kernel:
    """Return the kernel with its scans as ``Scan``s."""
    if not any(isinstance(n, Reduce) and scan_of(n) for n in kernel_nodes(kernel)):
        return kernel
    rewritten = kernel.map(lambda exprs: rewrite(exprs, _run))
    used = axes_of(rewritten.stores)
    bound = (a for n in kernel_nodes(rewritten) if isinstance(n, Reduce) for a in n.over)
    inside = dict.fromkeys((*(a for a in rewritten.inside if a in used), *bound))
    return replace(rewritten, inside=tuple(inside))


def _run(node: Expr) -> Expr:
    return (isinstance(node, Reduce) and scan_of(node)) or node
