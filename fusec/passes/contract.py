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
from fusec.ir.graph import Def, Extern, Graph, Kernel, Schedule, argument_views
from fusec.passes.dag import reads
from fusec.passes.fuse import Decision

Cut: TypeAlias = Callable[[Graph], tuple[Schedule, tuple[Decision, ...]]]
"""The passes from a graph to kernels."""


def cut_with_products(graph: Graph, cut: Cut) -> tuple[Schedule, tuple[Decision, ...]]:
    """Return the graph cut into kernels, with every product fused that has something to fuse with.

    Args:
        cut: the passes from a graph to kernels.
    """
    read = _read_buffers(graph)
    opened = {
        n.node
        for n in graph.nodes
        if isinstance(n, Extern)
        and n.meaning
        and read.intersection(n.outputs) <= {line.buffer for line in n.meaning}
    }
    while opened:
        schedule, decisions = cut(open_calls(graph, opened))
        lonely = _lonely(graph, schedule) & opened
        if not lonely:
            return schedule, decisions
        opened -= lonely
    return cut(graph)


def _read_buffers(graph: Graph) -> set[Buffer | None]:
    """Return the buffers that some line reads or the graph returns."""
    found = {view.buffer for view in argument_views(graph.outputs)}
    for node in graph.nodes:
        found.update(reads(node))
    return {*found}


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
    """Return the calls of one definition that share their kernel with nothing else."""
    call: dict[Buffer, str] = {
        n.meaning[0].buffer: n.node
        for n in graph.nodes
        if isinstance(n, Extern) and len(n.meaning) == 1
    }
    return {
        call[step.defs[0]]
        for step in schedule.steps
        if isinstance(step, Kernel) and len(step.defs) == 1 and step.defs[0] in call
    }
