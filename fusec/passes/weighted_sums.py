"""Which reductions one loop may compute together: a softmax of products, and what it weights.

``split_reduction`` leaves them whole. Split one by one, the maximum of some scores, the sum of
their exponentials and the values that these weight would each read the scores again; fused into one
kernel they are split together, by ``split_loop``.

Worked example::

    s[n] = sum(d: q[d] * k[n, d]);  m = max(n: s[n]);  w[n] = exp(s[n] - m)
    l = sum(n: w[n]);  y[d] = sum(n: w[n]/l * v[n, d])       m, l and y stay whole
"""

from __future__ import annotations

from fusec.ir.contraction import factors, vector_factors
from fusec.ir.expr import Buffer, Expr, Op, Reduce, loads, postorder
from fusec.ir.graph import Def, Graph
from fusec.ir.monoid import MAX


def softmax_weighted(graph: Graph) -> frozenset[Buffer]:
    """Return the reductions of softmaxes of products that a later product sums up, and its own."""
    scores: set[Buffer] = set()
    tops: set[Buffer] = set()
    weights: set[Buffer] = set()
    beside: dict[Buffer, Def] = {}
    found: set[Buffer] = set()
    lines = {line.buffer: line for line in graph.defs}
    for line in lines.values():
        sources = set(line.reads)
        reductions = [n for n in postorder((line.expr,)) if isinstance(n, Reduce)]
        if any(_weights_alone(n, weights) for n in reductions):
            found.add(line.buffer)
        if any(n.monoid is MAX for n in reductions) and sources & scores:
            tops.add(line.buffer)
        elif reductions and sources & weights:
            beside[line.buffer] = line
        elif any(_is_product(n) for n in reductions) or (sources & scores and not reductions):
            scores.add(line.buffer)
        if not reductions and sources & (tops | weights):
            weights.add(line.buffer)
    above = _ancestors(found, lines)
    return frozenset(found | above.intersection((*tops, *beside)))


def _is_product(node: Reduce) -> bool:
    return factors(node) is not None or vector_factors(node) is not None


def _weights_alone(node: Reduce, weights: set[Buffer]) -> bool:
    """Return True for a product of which one factor, and one alone, is made of weights."""
    if not _is_product(node) or not isinstance(node.body, Op):
        return False
    a, b = (_mentions(factor, weights) for factor in node.body.args)
    return a is not b


def _mentions(factor: Expr, weights: set[Buffer]) -> bool:
    return any(load.buffer in weights for load in loads((factor,)))


def _ancestors(buffers: set[Buffer], lines: dict[Buffer, Def]) -> set[Buffer]:
    """Return what some definitions are made of, by way of any number of others."""
    seen: set[Buffer] = set()
    stack = list(buffers)
    while stack:
        for source in lines[stack.pop()].reads:
            if source in lines and source not in seen:
                seen.add(source)
                stack.append(source)
    return seen
