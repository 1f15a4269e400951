"""Merge equal definitions of a graph: common subexpression elimination.

Spec: ``graph -> graph``. Of two definitions with equal types and layouts, and expressions that are
equal up to the names of axes, the second is removed and its consumers load the first. A model that
builds its causal mask in every layer keeps one mask. Definitions that are returned, or passed to an
impure extern, are not merged: a caller could observe that they alias.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.canonical import canonical
from fusec.ir.expr import Buffer
from fusec.ir.graph import Def, Extern, Graph, Line, RowLoop
from fusec.ir.index import Axis
from fusec.ir.rewrite import reading, rewrite


def merge_equal(graph: Graph) -> Graph:
    """Return the graph with equal definitions merged into the first."""
    fixed = set(graph.returned)
    fixed.update(buffer for line in graph.nodes if line.impure for buffer in line.reads)
    first: dict[tuple[object, ...], Buffer] = {}
    instead: dict[Buffer, Buffer] = {}
    rule = reading(instead)
    nodes: list[Line] = []
    for node in graph.nodes:
        match node:
            case Def():
                line = node.map(lambda exprs: rewrite(exprs, rule)) if instead else node
                known = first.setdefault(_identity(line), line.buffer)
                if known is line.buffer or line.buffer in fixed or known in fixed:
                    nodes.append(line)
                else:
                    instead[line.buffer] = known
            case Extern() | RowLoop():
                nodes.append(node.reading(instead))
            case _:
                nodes.append(node)
    if not instead:
        return graph
    return replace(graph, nodes=tuple(nodes))


def _identity(line: Def) -> tuple[object, ...]:
    """Return a key that is equal for definitions that are equal up to their axes."""
    found = canonical(line)
    read = (leaf for leaf in found.leaves if leaf is not line.buffer and not isinstance(leaf, Axis))
    return (line.buffer.shape, line.buffer.strides, found.form, *read)
