"""Find the reductions of a softmax-weighted sum, which one loop can compute together.

``split_reduction`` does not split them. Split one by one, the maximum of the scores, the sum of
their exponentials and the weighted sum of the values would each read the scores again; fused into
one kernel they are split together, by ``split_loop``.

Worked example::

    s[n] = sum(d: q[d] * k[n, d]);  m = max(n: s[n]);  w[n] = exp(s[n] - m)
    l = sum(n: w[n]);  y[d] = sum(n: w[n]/l * v[n, d])       m, l and y stay whole
"""

from __future__ import annotations

from fusec.ir.contraction import is_product
from fusec.ir.expr import Buffer, Op, Reduce, loads, reach, reductions
from fusec.ir.graph import Graph
from fusec.ir.monoid import MAX


def softmax_weighted(graph: Graph) -> frozenset[Buffer]:
    """Return the reductions of softmaxes over products, and the sums that they weight."""
    scores: set[Buffer] = set()
    tops: set[Buffer] = set()
    weights: set[Buffer] = set()
    beside: set[Buffer] = set()
    found: set[Buffer] = set()
    lines = {line.buffer: line for line in graph.defs}
    for line in lines.values():
        sources = set(line.reads)
        sums = reductions(line.expr)
        if any(_weights_alone(n, weights) for n in sums):
            found.add(line.buffer)
        if any(n.monoid is MAX for n in sums) and sources & scores:
            tops.add(line.buffer)
        elif sums and sources & weights:
            beside.add(line.buffer)
        elif any(map(is_product, sums)) or (sources & scores and not sums):
            scores.add(line.buffer)
        if not sums and sources & (tops | weights):
            weights.add(line.buffer)
    above = reach(found, lambda b: [s for s in lines[b].reads if s in lines])
    return frozenset(found | (tops | beside).intersection(above))


def _weights_alone(node: Reduce, weights: set[Buffer]) -> bool:
    """Return True for a product of which exactly one factor loads softmax weights."""
    if not is_product(node) or not isinstance(node.body, Op):
        return False
    a, b = (weights.isdisjoint(x.buffer for x in loads((f,))) for f in node.body.args)
    return a is not b
