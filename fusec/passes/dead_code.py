"""Remove definitions and pure externs whose results nobody reads.

Spec: ``graph -> graph``; outputs and impure externs keep their values; order is kept.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.expr import Buffer, loads
from fusec.ir.graph import Def, Extern, Graph, argument_views, extern_views


def dead_code(graph: Graph) -> Graph:
    """Return the graph without what does not reach an output or an impure extern."""
    live: set[Buffer] = {view.buffer for view in argument_views(graph.outputs)}
    kept: list[Def | Extern] = []
    for node in reversed(graph.nodes):
        match node:
            case Def() if node.buffer in live:
                kept.append(node)
                live.update(load.buffer for load in loads((node.expr,)))
            case Extern() if (
                node.impure or node.sizes or any(b in live for b in node.outputs if b is not None)
            ):
                kept.append(node)
                live.update(view.buffer for view in extern_views(node))
    if len(kept) == len(graph.nodes):
        return graph
    return replace(graph, nodes=tuple(reversed(kept)))
