"""Choose which products of matrices fusec computes itself.

A library call whose meaning index notation can say (``Extern.meaning``) may be *opened*: its
definitions take its place, and fuse with what stands around them. All are opened first; what ends
up in a kernel that has nothing beside the product gains nothing, and is closed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from fusec.ir.expr import Buffer
from fusec.ir.graph import Def, Extern, Graph, Kernel, Schedule
from fusec.passes.fuse import Decision

Cut: TypeAlias = Callable[[Graph], tuple[Schedule, tuple[Decision, ...]]]
"""The passes from a graph to kernels."""


def cut_with_products(graph: Graph, cut: Cut) -> tuple[Schedule, tuple[Decision, ...]]:
    """Return the graph cut into kernels, with every product fused that has something to fuse with.

    Args:
        cut: the passes from a graph to kernels.
    """
    opened = {n.node for n in graph.nodes if isinstance(n, Extern) and n.meaning}
    while opened:
        schedule, decisions = cut(open_calls(graph, opened))
        lonely = _lonely(graph, schedule) & opened
        if not lonely:
            return schedule, decisions
        opened -= lonely
    return cut(graph)


def open_calls(graph: Graph, opened: set[str]) -> Graph:
    """Return the graph with the meaning of some calls, by FX node, in their places."""
    nodes: list[Def | Extern] = []
    for node in graph.nodes:
        if isinstance(node, Extern) and node.node in opened:
            nodes.extend(node.meaning)
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _lonely(graph: Graph, schedule: Schedule) -> set[str]:
    """Return the calls whose definitions share a kernel with nothing else."""
    call: dict[Buffer, str] = {
        line.buffer: n.node for n in graph.nodes if isinstance(n, Extern) for line in n.meaning
    }
    found: set[str] = set()
    for step in schedule.steps:
        if isinstance(step, Kernel):
            owners = {call.get(buffer) for buffer in step.defs}
            if len(owners) == 1 and (owner := owners.pop()) is not None:
                found.add(owner)
    return found
