"""Round every 16-bit value between two operations, as eager's kernels do: ``precision="eager"``.

Spec: ``Graph -> Graph``; each ``f32(x)`` of a 16-bit x becomes ``round_bf16(f32(x))``, which
``simplify`` keeps when the producer is substituted for x. It runs once, after capture; in kernels
the roundings of values loaded from memory are dropped again.

    y[i] = bf16(f32(a[i]) * f32(b[i]));  z[i] = bf16(f32(y[i]) + f32(c[i]))

fuses to ``bf16(round_bf16(f32(a[i]) * f32(b[i])) + f32(c[i]))``.
"""

from __future__ import annotations

from fusec.ir.dtype import F32
from fusec.ir.expr import Cast, Expr, Op
from fusec.ir.graph import Graph
from fusec.ir.rewrite import Rewriter
from fusec.ir.scalar import ROUND


def round_as_eager(graph: Graph) -> Graph:
    """Return the graph with an explicit rounding around each widened 16-bit value."""
    return graph.map(Rewriter(_mark))


def _mark(node: Expr) -> Expr:
    if isinstance(node, Cast) and node.dtype is F32 and node.arg.dtype in ROUND:
        return Op(ROUND[node.arg.dtype], (node,))
    return node
