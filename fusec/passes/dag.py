"""Who makes and who reads each buffer: the dependencies between lines of a graph, or steps."""

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
class BufferReaders:
    """The readers of each buffer.

    Attributes:
        producer: buffer -> position of the line that makes it.
        readers: buffer -> positions of the definitions that load it.
        live_out: buffers that an extern reads or the graph returns: these must be in memory.
    """

    producer: dict[Buffer, int]
    readers: dict[Buffer, tuple[int, ...]]
    live_out: frozenset[Buffer]


def find_uses(graph: Graph) -> BufferReaders:
    """Return producers, readers and live-out buffers of a graph."""
    producer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    live_out = set(graph.returned)
    for position, node in enumerate(graph.nodes):
        producer.update((buffer, position) for buffer in node.writes)
        if isinstance(node, Def):
            for buffer in node.reads:
                readers.setdefault(buffer, []).append(position)
        else:
            live_out.update(node.reads)
    return BufferReaders(producer, {b: tuple(r) for b, r in readers.items()}, frozenset(live_out))


class Overwrites:
    """Where calls write to memory that lines before them read: no read may be moved beyond.

    Worked example: of ``m = 2 * a; copy_(a, b); y = sin(m)`` ``m`` has to be stored, for ``y``
    would read ``a`` behind its change.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self.places: dict[Buffer, list[int]] = {}
        for position, line in enumerate(lines):
            for buffer in dict.fromkeys((*line.reads, *line.writes)) if line.impure else ():
                self.places.setdefault(buffer, []).append(position)

    def between(self, sources: Iterable[Buffer], first: int, last: int) -> bool:
        """Return True if a source may change after line ``first`` and before line ``last``."""
        places = self.places
        return bool(places) and any(
            first < place < last for buffer in sources for place in places.get(buffer, ())
        )


def dependencies(steps: Sequence[Line | Step]) -> Dag:
    """Return the DAG of lines or steps that are in an order of execution, by position.

    An edge a -> b means that b must run after a: b reads or writes again what a makes, or b writes
    in place what a reads, or b has a size that a gives or checks, or both are impure and a stands
    first. An impure call may write any of its arguments.
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
    """Return how many steps read each buffer; what the graph returns counts as one more."""
    count = Counter(buffer for step in schedule.steps for buffer in step.reads)
    count.update(schedule.graph.returned)
    return count


def below(dag: Dag, members: set[int]) -> set[int]:
    """Return some lines and what depends on one of them."""
    return set(reach(members, lambda n: list(dag.successors(n))))


def between(dag: Dag, members: set[int]) -> set[int]:
    """Return some lines and what depends on one of them and is needed by one."""
    above = reach(members, lambda n: list(dag.predecessors(n)))
    return below(dag, members) & set(above)


class TopologicalOrder:
    """A topological order of a DAG that is kept while nodes are merged, two at a time.

    Whether a merge would close a cycle is asked for every pair that fusion considers. A path from
    one node to another runs through nodes between them in the order, so nothing beyond is searched;
    and a merge moves only what stands between the two (as Pearce and Kelly, 2006, do for edges).
    """

    def __init__(self, dag: Dag) -> None:
        self.dag = dag
        nodes = list(nx.topological_sort(dag))
        self.line: list[int | None] = [*nodes]  # None where a node was
        self.position = {node: place for place, node in enumerate(nodes)}

    def has_detour(self, a: int, b: int) -> bool:
        """Return True if a path of several edges joins the two: merging would close a cycle."""
        first, last = sorted((a, b), key=self.position.__getitem__)
        return self._between(first, last) is None

    def _between(self, first: int, last: int) -> set[int] | None:
        """Return what needs ``first`` and stands before ``last``; None if ``last`` needs it."""
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
        """Return, in order, what stands on paths of several edges between two nodes."""
        first, last = sorted((a, b), key=self.position.__getitem__)
        at, dag = self.position, self.dag
        later = set(reach((first,), lambda n: [s for s in dag.successors(n) if at[s] < at[last]]))
        found = reach((last,), lambda n: later.intersection(dag.predecessors(n)))
        return sorted({*found} - {first, last}, key=at.__getitem__)

    def merge(self, a: int, b: int, merged: int) -> None:
        """Put one node where two were; they have no detour."""
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
    """Return the nodes of a DAG in an order that is topological and close to their numbers."""
    return list(nx.lexicographical_topological_sort(dag))


def chain_lengths(dag: Dag) -> dict[int, int]:
    """Return for each node, by number, how many nodes the longest chain before it has."""
    length: dict[int, int] = {}
    for node in nx.topological_sort(dag):
        length[node] = max((length[p] + 1 for p in dag.predecessors(node)), default=0)
    return dict(sorted(length.items()))


def joined(dag: Dag, place: Mapping[int, int]) -> Dag:
    """Return a DAG with ``place[node]`` where each node was; nodes of one place have no path."""
    found: Dag = nx.DiGraph()
    found.add_nodes_from(place[node] for node in dag.nodes)
    found.add_edges_from((place[a], place[b]) for a, b in dag.edges)
    return found


def in_order(items: Iterable[_T], before: Mapping[_T, set[_T]]) -> list[_T] | None:
    """Return some items in their own order as far as what stands before each allows, or None."""
    left, order = list(items), []
    while left:
        ready = next((a for a in left if before.get(a, set()).isdisjoint(left)), None)
        if ready is None:
            return None
        order.append(ready)
        left.remove(ready)
    return order
