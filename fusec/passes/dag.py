"""Who defines and who reads each buffer: the dependencies between the lines of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

from fusec.ir.expr import Buffer, Expr, IndexValue, Load, Reduce, loads, postorder
from fusec.ir.graph import (
    Argument,
    Bundle,
    Chunked,
    Comparison,
    Def,
    Extern,
    Graph,
    Junction,
    Kernel,
    SizeValue,
    Step,
    View,
    argument_views,
    extern_views,
    sizes_in,
)
from fusec.ir.index import Index, Size

Dag: TypeAlias = "nx.DiGraph[int]"


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
    reads, or b has a size that a gives or checks, or both are impure and a stands first.
    """
    dag: nx.DiGraph[int] = nx.DiGraph()
    producer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    giver: dict[Size, int] = {}
    last_impure: int | None = None
    for position, node in enumerate(graph.nodes):
        dag.add_node(position)
        sources = reads(node)
        for buffer in sources:
            if buffer in producer:
                dag.add_edge(producer[buffer], position)
        if giver:
            dag.add_edges_from((giver[s], position) for s in sizes_of(node) if s in giver)
        if isinstance(node, Extern):
            giver.update((size, position) for size in _settled_sizes(node))
        if isinstance(node, Extern) and node.impure:
            # It may write any of its arguments: every earlier reader and writer comes first, and
            # every later one after (by registering this line as the producer).
            for buffer in sources:
                dag.add_edges_from((r, position) for r in readers.get(buffer, ()) if r != position)
                producer[buffer] = position
            if last_impure is not None:
                dag.add_edge(last_impure, position)
            last_impure = position
        for buffer in sources:
            readers.setdefault(buffer, []).append(position)
        for buffer in writes(node):
            producer[buffer] = position
    return dag


def sizes_of(step: Def | Step) -> set[Size]:
    """Return the symbolic sizes that a line or a step mentions."""
    match step:
        case Def():
            found = _sizes_in_exprs((step.expr,)) | sizes_in(axis.extent for axis in step.axes)
        case Extern():
            args = [*step.args, *(value for _, value in step.kwargs)]
            found = sizes_in(i for arg in args for i in _argument_indices(arg))
        case Chunked():
            found = sizes_in(e for view in step.views for e in (*view.shape, view.offset))
        case Bundle():
            found = {s for kernel in step.kernels for s in sizes_of(kernel)}
        case Kernel():
            found = _sizes_in_exprs(store.expr for store in step.stores)
            found |= sizes_in(axis.extent for axis in step.axes)
            found |= sizes_in(i for store in step.stores for i in store.indices)
    return found


def _settled_sizes(call: Extern) -> set[Size]:
    """Return the sizes that a call gives, or about which it asserts what others rely on."""
    conditions = [arg for arg in call.args if isinstance(arg, Comparison | Junction)]
    asserted = sizes_in(i for condition in conditions for i in _argument_indices(condition))
    return {bound.size for bound in call.sizes} | asserted


def _argument_indices(arg: Argument) -> Iterator[Index]:
    match arg:
        case View():
            yield from (*arg.shape, *arg.strides, arg.offset)
        case SizeValue():
            yield arg.index
        case Comparison():
            yield from (arg.left, arg.right)
        case Junction(parts=items) | (tuple() as items):
            for item in items:
                yield from _argument_indices(item)


def _sizes_in_exprs(roots: Iterable[Expr]) -> set[Size]:
    found: set[Size] = set()
    for node in postorder(roots):
        match node:
            case Load():
                found |= sizes_in(node.indices)
            case IndexValue():
                found |= sizes_in((node.index,))
            case Reduce():
                found |= sizes_in(axis.extent for axis in node.over)
    return found


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


class Order:
    """A topological order of a DAG that is kept while nodes are merged, two at a time.

    Whether a merge would close a cycle is asked for every pair that fusion considers. A path from
    one node to another runs through nodes between them in the order, so nothing beyond is searched;
    and a merge moves only what stands between the two (as Pearce and Kelly, 2006, do for edges).
    """

    def __init__(self, dag: nx.DiGraph[int]) -> None:
        self.dag = dag
        nodes = list(nx.topological_sort(dag))
        self.line: list[int | None] = [*nodes]  # None where a node was
        self.place = {node: place for place, node in enumerate(nodes)}

    def has_detour(self, a: int, b: int) -> bool:
        """Return True if a path of several edges joins the two: merging would close a cycle."""
        first, last = sorted((a, b), key=self.place.__getitem__)
        return self._between(first, last) is None

    def _between(self, first: int, last: int) -> set[int] | None:
        """Return what needs ``first`` and stands before ``last``; None if ``last`` needs it."""
        end = self.place[last]
        found: set[int] = set()
        waiting = [n for n in self.dag.successors(first) if n != last]
        while waiting:
            node = waiting.pop()
            if node == last:
                return None
            if node not in found and self.place[node] < end:
                found.add(node)
                waiting.extend(self.dag.successors(node))
        return found

    def on_detours(self, a: int, b: int) -> list[int]:
        """Return, in order, what stands on paths of several edges between two nodes."""
        first, last = sorted((a, b), key=self.place.__getitem__)
        end = self.place[last]
        below: set[int] = set()
        waiting = [first]
        while waiting:
            later = {n for n in self.dag.successors(waiting.pop()) if self.place[n] < end} - below
            below |= later
            waiting.extend(later)
        found: set[int] = set()
        waiting = [last]
        while waiting:
            earlier = {n for n in self.dag.predecessors(waiting.pop()) if n in below} - found
            found |= earlier
            waiting.extend(earlier)
        return sorted(found, key=self.place.__getitem__)

    def merge(self, a: int, b: int, merged: int) -> None:
        """Put one node where two were; they have no detour."""
        first, last = sorted((a, b), key=self.place.__getitem__)
        later = self._between(first, last) or set()
        start, end = self.place.pop(first), self.place.pop(last)
        nodes = [n for n in self.line[start + 1 : end] if n is not None]
        kept = [n for n in nodes if n not in later]
        order = [*kept, merged, *(n for n in nodes if n in later)]
        self.line[start : end + 1] = [*order, *(None for _ in range(end + 1 - start - len(order)))]
        self.place.update((node, place) for place, node in enumerate(order, start))
        self._contract(a, b, merged)

    def _contract(self, a: int, b: int, merged: int) -> None:
        predecessors = {*self.dag.predecessors(a), *self.dag.predecessors(b)} - {a, b}
        successors = {*self.dag.successors(a), *self.dag.successors(b)} - {a, b}
        self.dag.remove_nodes_from((a, b))
        self.dag.add_node(merged)
        self.dag.add_edges_from((p, merged) for p in predecessors)
        self.dag.add_edges_from((merged, s) for s in successors)


# -- steps of a schedule ---------------------------------------------------------------------------


def step_reads(step: Step) -> tuple[Buffer, ...]:
    """Return the distinct buffers that a step reads, in order."""
    match step:
        case Extern():
            found = [view.buffer for view in extern_views(step)]
        case Chunked():
            found = [view.buffer for view in step.views]
        case Bundle():
            found = [b for kernel in step.kernels for b in step_reads(kernel)]
        case Kernel():
            found = [load.buffer for load in loads(s.expr for s in step.stores)]
    return tuple(dict.fromkeys(b.base for b in found))


def step_writes(step: Step) -> tuple[Buffer, ...]:
    """Return the distinct buffers that a step writes; of an eager kernel those that it makes."""
    match step:
        case Extern():
            found = [b for b in step.outputs if b is not None]
        case Chunked():
            found = list(step.made)
        case Bundle():
            found = [b for kernel in step.kernels for b in step_writes(kernel)]
        case Kernel():
            found = [store.buffer for store in step.stores]
    return tuple(dict.fromkeys(b.base for b in found))


def step_dependencies(steps: Sequence[Step]) -> Dag:
    """Return the DAG of steps that are in an order of execution, by position.

    An edge a -> b means that b must run after a: as of ``dependencies``, and because a kernel may
    write an input in place.
    """
    dag: Dag = nx.DiGraph()
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    giver: dict[Size, int] = {}
    last_impure: int | None = None
    for position, step in enumerate(steps):
        dag.add_node(position)
        sources, made = step_reads(step), step_writes(step)
        impure = isinstance(step, Extern) and step.impure
        dag.add_edges_from((writer[b], position) for b in (*sources, *made) if b in writer)
        for buffer in (*sources, *made) if impure else made:
            dag.add_edges_from((r, position) for r in readers.pop(buffer, ()))
            writer[buffer] = position
        for buffer in sources:
            readers.setdefault(buffer, []).append(position)
        if giver:
            dag.add_edges_from((giver[s], position) for s in sizes_of(step) if s in giver)
        if isinstance(step, Extern):
            giver.update((size, position) for size in _settled_sizes(step))
        if impure:
            if last_impure is not None:
                dag.add_edge(last_impure, position)
            last_impure = position
    return dag


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


def in_order(count: int, edges: Iterable[tuple[int, int]]) -> list[int] | None:
    """Return ``0 .. count`` sorted so that edges point forward; None if they make a circle."""
    dag: Dag = nx.DiGraph()
    dag.add_nodes_from(range(count))
    dag.add_edges_from(edges)
    return sorted_steps(dag) if nx.is_directed_acyclic_graph(dag) else None
