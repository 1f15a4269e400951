"""Compute again what is too wide to store: the scores of an attention, in each of its readers.

Spec: ``graph -> graph``. A product of matrices is *wide* if it has many more elements than all that
it is computed from, and sums over few: scores ``s[m, n] = sum(d: q[m, d] * k[n, d])`` of 1024
queries and keys have 8 times the elements of q and k for 64 terms each. So is what is computed from
it point by point. Wide definitions are substituted into their readers, a sum for the softmax, a
product with the values, each of which then loops over tiles of the scores; no reader waits for
memory, and readers in different directions (dq along keys, dk and dv along queries) need not share
a kernel.

Only products that are fusec's own count; what a library call makes is in memory.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.contraction import factors
from fusec.ir.expr import Buffer, loads, reductions
from fusec.ir.graph import Def, Graph
from fusec.ir.index import product
from fusec.ir.rewrite import inline_loads
from fusec.passes.dag import Overwrites, find_uses
from fusec.passes.fusion.cost import numel
from fusec.passes.graph.simplify import simplifier
from fusec.passes.schedule.contraction import MAX_LANES

WIDE = 3
"""How many times the elements of all operands a product has that is computed again."""


def recompute_wide(graph: Graph) -> Graph:
    """Return the graph with wide products, and what follows from them, in their readers."""
    uses = find_uses(graph)
    overwrites = Overwrites(graph.nodes)
    wide: dict[Buffer, Def] = {}

    def take(node: Def) -> tuple[Def, ...]:
        line = _substituted(node, wide)
        readers = uses.readers.get(node.buffer, ())
        alone = (
            node.buffer not in uses.live_out
            and bool(readers)
            and not overwrites.between(line.reads, uses.producer[node.buffer], readers[-1])
        )
        if alone and (is_wide_product(node) or _follows(node, line, wide)):
            wide[node.buffer] = line
            return ()
        return (line,)

    return graph.map_defs(take)


def _substituted(line: Def, wide: dict[Buffer, Def]) -> Def:
    found = inline_loads(line, wide, simplifier())
    sources = [wide[buffer] for buffer in line.reads if buffer in wide]
    covers = (*line.covers, *(b for source in sources for b in (*source.covers, source.buffer)))
    return replace(found, covers=tuple(dict.fromkeys(covers))) if sources else line


def is_wide_product(line: Def) -> bool:
    """Return True for one product of matrices with far more elements than its operands."""
    products = reductions(line.expr)
    if len(products) != 1 or factors(products[0]) is None:
        return False
    terms = product(axis.extent for axis in products[0].over)
    operands = sum(numel(buffer) for buffer in line.reads)
    # The operands' rows are lanes as a whole.
    short = terms.is_constant and terms.const <= MAX_LANES
    return short and numel(line.buffer) >= WIDE * operands


def _follows(line: Def, substituted: Def, wide: dict[Buffer, Def]) -> bool:
    """Return True for a pointwise definition of something wide, of the same size."""
    if substituted is line or reductions(line.expr):
        return False
    sources = [x.buffer for x in loads((line.expr,)) if x.buffer in wide]
    return numel(line.buffer) >= max(map(numel, sources))
