"""Who defines and who reads each buffer: the dependencies between the lines of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import networkx as nx

from fusec.ir.expr import Buffer, loads
from fusec.ir.graph import Def, Extern, Graph, argument_views, extern_views


@dataclass(frozen=True, slots=True)
class Uses:
    """The readers of each buffer.

    Attributes:
        producer: buffer -> position of the line that makes it.
        readers: buffer -> positions of the definitions that load it.
        live_out: buffers that an extern reads or the graph returns: these must be in memory.
    """

    producer: dict[Buffer, int]
    readers: dict[Buffer, tuple[int, ...]]
    live_out: frozenset[Buffer]


def reads(node: Def | Extern) -> tuple[Buffer, ...]:
    """Return the distinct buffers a line reads, in order."""
    if isinstance(node, Extern):
        return tuple(dict.fromkeys(view.buffer for view in extern_views(node)))
    return tuple(dict.fromkeys(load.buffer for load in loads((node.expr,))))


def writes(node: Def | Extern) -> tuple[Buffer, ...]:
    """Return the buffers a line defines."""
    if isinstance(node, Extern):
        return tuple(b for b in node.outputs if b is not None)
    return (node.buffer,)


def find_uses(graph: Graph) -> Uses:
    """Return producers, readers and live-out buffers of a graph."""
    producer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    live_out: set[Buffer] = {view.buffer for view in argument_views(graph.outputs)}
    for position, node in enumerate(graph.nodes):
        for buffer in writes(node):
            producer[buffer] = position
        if isinstance(node, Extern):
            live_out.update(reads(node))
            continue
        for buffer in reads(node):
            readers.setdefault(buffer, []).append(position)
    return Uses(producer, {b: tuple(r) for b, r in readers.items()}, frozenset(live_out))


def dependencies(graph: Graph) -> nx.DiGraph[int]:
    """Return the DAG of the graph's lines, by position.

    An edge a -> b means that b must run after a: b reads what a makes, or b writes in place what a
    reads, or both are impure and a stands first.
    """
    dag: nx.DiGraph[int] = nx.DiGraph()
    producer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    last_impure: int | None = None
    for position, node in enumerate(graph.nodes):
        dag.add_node(position)
        for buffer in reads(node):
            if buffer in producer:
                dag.add_edge(producer[buffer], position)
        if isinstance(node, Extern) and node.impure:
            # It may write any of its arguments: every earlier reader and writer comes first, and
            # every later one after (by registering this line as the producer).
            for buffer in reads(node):
                dag.add_edges_from((r, position) for r in readers.get(buffer, ()) if r != position)
                producer[buffer] = position
            if last_impure is not None:
                dag.add_edge(last_impure, position)
            last_impure = position
        for buffer in reads(node):
            readers.setdefault(buffer, []).append(position)
        for buffer in writes(node):
            producer[buffer] = position
    return dag


def below(dag: nx.DiGraph[int], members: set[int]) -> set[int]:
    """Return what depends on one of some lines."""
    return _reach(members, dag.successors)


def between(dag: nx.DiGraph[int], members: set[int]) -> set[int]:
    """Return what depends on one of some lines and is needed by one."""
    return below(dag, members) & _reach(members, dag.predecessors)


def _reach(starts: set[int], following: Callable[[int], Iterable[int]]) -> set[int]:
    found: set[int] = set()
    waiting = list(starts)
    while waiting:
        for other in following(waiting.pop()):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found
