"""Recompute products that are too wide to store, such as attention scores, in each consumer.

Spec: ``graph -> graph``. A matrix product is *wide* if it has many more elements than its operands
together, and sums over few terms: scores ``s[m, n] = sum(d: q[m, d] * k[n, d])`` of 1024 queries
and keys have 8 times the elements of q and k for 64 terms each. A pointwise definition of a wide
one is wide, too. Wide definitions are substituted into their consumers, the softmax's sum or the
product with the values, each of which then loops over tiles of the scores; no consumer waits for
memory, and consumers in different directions (dq along keys, dk and dv along queries) need not
share a kernel. A scatter reads them from memory: each of its elements would multiply all sources.

Only decomposed products count; the result of a kept library call is in memory.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.contraction import factors, is_window
from fusec.ir.expr import Buffer, loads, reductions
from fusec.ir.graph import Def, Graph
from fusec.ir.machine import Machine
from fusec.ir.rewrite import inline_loads
from fusec.ir.serial import hits_of
from fusec.passes.dag import find_uses
from fusec.passes.fusion.cost import numel
from fusec.passes.graph.reduction_rules import AXIS_RULES
from fusec.passes.graph.simplify import simplifier


def recompute_wide(graph: Graph, machine: Machine) -> Graph:
    """Return the graph with wide products and their pointwise followers inlined into consumers."""
    uses = find_uses(graph)
    wide: dict[Buffer, Def] = {}
    scatters = [n for n in graph.defs if any(map(hits_of, reductions(n.expr)))]
    scattered = {buffer for node in scatters for buffer in node.reads}

    def take(node: Def) -> tuple[Def, ...]:
        line = _substituted(node, wide)
        inner = node.buffer in uses.readers and node.buffer not in uses.live_out | scattered
        alone = inner and uses.may_move(line.reads, node.buffer)
        if alone and (is_wide_product(node, machine) or _follows(node, line, wide)):
            wide[node.buffer] = line
            return ()
        return (line,)

    return graph.map_defs(take)


def _substituted(line: Def, wide: dict[Buffer, Def]) -> Def:
    found = inline_loads(line, wide, simplifier(AXIS_RULES))
    sources = [wide[buffer] for buffer in line.reads if buffer in wide]
    covers = (*line.covers, *(b for source in sources for b in (*source.covers, source.buffer)))
    return replace(found, covers=tuple(dict.fromkeys(covers))) if sources else line


def is_wide_product(line: Def, machine: Machine) -> bool:
    """Return True for one product of matrices with far more elements than its operands.

    It sums along one axis, a row of each operand: a convolution sums a window and channels.
    """
    products = reductions(line.expr)
    if len(products) != 1 or factors(products[0]) is None or is_window(products[0]):
        return False
    if products[0].over[0].limit is not None:  # which is said of an axis of this line
        return False
    terms = products[0].over[0].extent
    operands = sum(numel(buffer) for buffer in line.reads)
    # A whole row of an operand has to fit the lanes.
    short = terms.is_constant and terms.const <= machine.lanes
    return short and numel(line.buffer) >= machine.fusion.wide * operands


def _follows(line: Def, substituted: Def, wide: dict[Buffer, Def]) -> bool:
    """Return True for a pointwise definition of wide buffers that is at least as large as they."""
    if substituted is line or reductions(line.expr):
        return False
    sources = [x.buffer for x in loads((line.expr,)) if x.buffer in wide]
    return numel(line.buffer) >= max(map(numel, sources))
