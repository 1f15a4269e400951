"""Producers and consumers of buffers: the dependency DAG of the lines of a graph, or of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import networkx as nx

from fusec.ir.expr import Buffer, reach
from fusec.ir.graph import Def, Graph, Line, Schedule, Step
from fusec.ir.index import Size

Dag: TypeAlias = "nx.DiGraph[int]"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class UseDef:
    """Def-use chains of a graph, by the positions of its lines.

    Attributes:
        producer: buffer -> position of the line that writes it.
        readers: buffer -> positions of the definitions that load it.
        live_out: buffers that an extern reads or the graph returns: these must be in memory.
        overwrites: buffer -> positions of the impure calls that may write it.
    """

    producer: dict[Buffer, int]
    readers: dict[Buffer, list[int]]
    live_out: set[Buffer]
    overwrites: dict[Buffer, list[int]]

    def may_move(self, sources: Iterable[Buffer], line: Buffer) -> bool:
        """Return True if no source may be written between a line and its last consumer.

        Worked example: in ``m = 2 * a; copy_(a, b); y = sin(m)`` the definition of ``m`` must not
        be substituted into ``y``, which would load ``a`` after ``copy_`` has changed it.
        """
        first, last = self.producer[line], self.readers[line][-1]
        places = (place for buffer in sources for place in self.overwrites.get(buffer, ()))
        return not any(first < place < last for place in places)


def find_uses(graph: Graph) -> UseDef:
    """Return producers, consumers and live-out buffers of a graph."""
    uses = UseDef({}, {}, set(graph.returned), {})
    for position, line in enumerate(graph.nodes):
        uses.producer.update((buffer, position) for buffer in line.writes)
        if isinstance(line, Def):
            for buffer in line.reads:
                uses.readers.setdefault(buffer, []).append(position)
        else:
            uses.live_out.update(line.reads)
        for buffer in dict.fromkeys((*line.reads, *line.writes)) if line.impure else ():
            uses.overwrites.setdefault(buffer, []).append(position)
    return uses


def dependencies(steps: Sequence[Line | Step]) -> Dag:
    """Return the dependency DAG of lines or steps in execution order; nodes are positions.

    An edge a -> b means that b must run after a: b reads or writes a buffer that a writes, or b
    writes a buffer that a reads, or b uses a size that a defines or checks, or both are impure and
    a comes first. An impure call may write any of its arguments.
    """
    dag: Dag = nx.DiGraph()
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    definer: dict[Size, int] = {}
    last_impure: int | None = None
    for position, step in enumerate(steps):
        dag.add_node(position)
        sources, made = step.reads, step.writes
        dag.add_edges_from((writer[b], position) for b in (*sources, *made) if b in writer)
        for buffer in (*sources, *made) if step.impure else made:
            dag.add_edges_from((r, position) for r in readers.pop(buffer, ()))
            writer[buffer] = position
        for buffer in sources:
            readers.setdefault(buffer, []).append(position)
        if definer:
            dag.add_edges_from((definer[s], position) for s in step.sizes if s in definer)
        definer.update((size, position) for size in step.defines_sizes)
        if step.impure:
            if last_impure is not None:
                dag.add_edge(last_impure, position)
            last_impure = position
    return dag


def count_readers(schedule: Schedule) -> Counter[Buffer]:
    """Return how many steps read each buffer; a buffer that the graph returns counts one more."""
    count = Counter(buffer for step in schedule.steps for buffer in step.reads)
    count.update(schedule.graph.returned)
    return count


def below(dag: Dag, members: set[int]) -> set[int]:
    """Return ``members`` and all their descendants."""
    return set(reach(members, lambda n: list(dag.successors(n))))


def between(dag: Dag, members: set[int]) -> set[int]:
    """Return ``members`` and all nodes on paths between two of them."""
    above = reach(members, lambda n: list(dag.predecessors(n)))
    return below(dag, members) & set(above)


class TopologicalOrder:
    """A topological order of a DAG, maintained while nodes are merged, two at a time.

    Fusion checks for every candidate pair whether a merge would close a cycle. A path from one node
    to another runs through nodes between them in the order, so the search is bounded by the two
    positions; a merge reorders only that interval (as Pearce and Kelly, 2006, do for edges).
    """

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        nodes = list(nx.topological_sort(dag))
        self.line: list[int | None] = [*nodes]  # None where a node was removed
        self.position = {node: place for place, node in enumerate(nodes)}

    def has_detour(self, a: int, b: int) -> bool:
        """Return True if a path of two or more edges joins the two: a merge would close a cycle."""
        first, last = sorted((a, b), key=self.position.__getitem__)
        return self._between(first, last) is None

    def _between(self, first: int, last: int) -> set[int] | None:
        """Return the descendants of ``first`` before ``last``; None if a detour joins the two."""
        end = self.position[last]
        found: set[int] = set()
        waiting = [n for n in self.dag.successors(first) if n != last]
        while waiting:
            node = waiting.pop()
            if node == last:
                return None
            if node not in found and self.position[node] < end:
                found.add(node)
                waiting.extend(self.dag.successors(node))
        return found

    def on_detours(self, a: int, b: int) -> list[int]:
        """Return the inner nodes of all paths between two nodes, in topological order."""
        first, last = sorted((a, b), key=self.position.__getitem__)
        at, dag = self.position, self.dag
        later = set(reach((first,), lambda n: [s for s in dag.successors(n) if at[s] < at[last]]))
        found = reach((last,), lambda n: later.intersection(dag.predecessors(n)))
        return sorted({*found} - {first, last}, key=at.__getitem__)

    def merge(self, a: int, b: int, merged: int) -> None:
        """Replace two nodes, between which there is no detour, by one."""
        first, last = sorted((a, b), key=self.position.__getitem__)
        later = self._between(first, last) or set()
        start, end = self.position.pop(first), self.position.pop(last)
        nodes = [n for n in self.line[start + 1 : end] if n is not None]
        kept = [n for n in nodes if n not in later]
        order = [*kept, merged, *(n for n in nodes if n in later)]
        self.line[start : end + 1] = [*order, *(None for _ in range(end + 1 - start - len(order)))]
        self.position.update((node, place) for place, node in enumerate(order, start))
        self._contract(a, b, merged)

    def _contract(self, a: int, b: int, merged: int) -> None:
        predecessors = {*self.dag.predecessors(a), *self.dag.predecessors(b)} - {a, b}
        successors = {*self.dag.successors(a), *self.dag.successors(b)} - {a, b}
        self.dag.remove_nodes_from((a, b))
        self.dag.add_node(merged)
        self.dag.add_edges_from((p, merged) for p in predecessors)
        self.dag.add_edges_from((merged, s) for s in successors)


# -- orders ----------------------------------------------------------------------------------------


def sorted_steps(dag: Dag) -> list[int]:
    """Return the nodes of a DAG in topological order, by number where the DAG leaves a choice."""
    return list(nx.lexicographical_topological_sort(dag))


def chain_lengths(dag: Dag) -> dict[int, int]:
    """Return node -> number of edges on the longest path that ends at it, sorted by node."""
    length: dict[int, int] = {}
    for node in nx.topological_sort(dag):
        length[node] = max((length[p] + 1 for p in dag.predecessors(node)), default=0)
    return dict(sorted(length.items()))


def joined(dag: Dag, place: Mapping[int, int]) -> Dag:
    """Return the DAG with ``place[node]`` for each node; no path may join nodes of one place."""
    found: Dag = nx.DiGraph()
    found.add_nodes_from(place[node] for node in dag.nodes)
    found.add_edges_from((place[a], place[b]) for a, b in dag.edges)
    return found


def stable_topological_sort(items: Iterable[_T], before: Mapping[_T, set[_T]]) -> list[_T] | None:
    """Return the items in a stable topological order, or None if ``before`` has a cycle."""
    left, order = list(items), []
    while left:
        ready = next((a for a in left if before.get(a, set()).isdisjoint(left)), None)
        if ready is None:
            return None
        order.append(ready)
        left.remove(ready)
    return order
