"""Remove definitions and pure externs whose results are unused.

Spec: ``graph -> graph``; outputs and impure externs keep their values; order is kept.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.graph import Graph, Line


def dead_code(graph: Graph) -> Graph:
    """Return the graph without lines that no output, impure extern or size depends on."""
    live = set(graph.returned)
    kept: list[Line] = []
    for line in reversed(graph.nodes):
        if line.impure or line.defines_sizes or not live.isdisjoint(line.writes):
            kept.append(line)
            live.update(line.reads)
    if len(kept) == len(graph.nodes):
        return graph
    return replace(graph, nodes=tuple(reversed(kept)))
