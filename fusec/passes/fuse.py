"""Fusion: which definitions share a kernel. Legal by ``unify``, priced by ``cost``, best first.

Every definition starts as a kernel of its own. A priority queue holds the pairs that could merge
(producer and reader, two readers of one large buffer, two reductions of one shape), ordered by
modelled microseconds saved. The best pair is merged if the graph stays acyclic, ``unify`` accepts
it and the merged kernel is modelled faster than the two apart; its neighbours are then priced
again. Every merge taken or rejected leaves a ``Decision``.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx

from fusec.ir.expr import Buffer
from fusec.ir.graph import Def, Extern, Graph, Kernel, Schedule
from fusec.passes.cost import Machine, numel, price
from fusec.passes.dag import dependencies, find_uses, reads
from fusec.passes.unify import Rejection, unify

SHARED_BYTES = 1 << 12
"""Two readers of a smaller buffer gain nothing by sharing it."""
SMALL_BYTES = 1 << 23
"""Reductions of like shape over less than this are paired, to save the launch, if nothing else."""
MAX_ALIKE = 8
"""Definitions in a kernel of reductions that have nothing in common but their shape."""
SIBLINGS = 6
"""Each reader of a shared buffer is paired with so many next readers."""
DETOUR = "a kernel or extern between them needs one's result and makes the other's input"
MAX_DEFS = 64
"""Definitions in one kernel: compilers, and readers, have their limits."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One merge that was considered.

    Attributes:
        a, b: buffers of the two kernels, joined by ``+``.
        taken: merged or not.
        reason: the rule that allowed or forbade it.
        saved_us: modelled time saved; None where the merge was not legal.
    """

    a: str
    b: str
    taken: bool
    reason: str
    saved_us: float | None


@dataclass(slots=True, eq=False)
class _Group:
    """A kernel in the making: positions of its definitions, in execution order."""

    serial: int
    members: tuple[int, ...]
    kernel: Kernel
    us: float
    touched: dict[Buffer, int] | None = None


class _Fuser:
    def __init__(self, graph: Graph, machine: Machine, accepts: Callable[[Kernel], bool]) -> None:
        self.graph = graph
        self.machine = machine
        self.accepts = accepts
        self.uses = find_uses(graph)
        self.dag = dependencies(graph)
        self.serial = itertools.count(len(graph.nodes))
        self.groups: dict[int, _Group] = {}
        self.queue: list[tuple[float, int, int, bool]] = []
        self.decisions: list[Decision] = []
        self.attempts: dict[tuple[int, ...], tuple[Kernel, float] | Rejection] = {}

    # -- pieces ------------------------------------------------------------------------------------

    def build(self, members: tuple[int, ...]) -> tuple[Kernel, float] | Rejection:
        """Unify and price some definitions; remembered by their positions."""
        known = self.attempts.get(members)
        if known is not None:
            return known
        defs = tuple(n for i in members if isinstance(n := self.graph.nodes[i], Def))
        inner = set(members)
        needed = frozenset(
            d.buffer
            for d in defs
            if d.buffer in self.uses.live_out
            or any(r not in inner for r in self.uses.readers.get(d.buffer, ()))
        )
        result: tuple[Kernel, float] | Rejection
        try:
            kernel = unify(defs, needed)
            if len(members) > 1 and not self.accepts(kernel):
                raise Rejection("no schedule of the target runs both as one kernel")
            result = (kernel, price(kernel, self.machine).us)
        except Rejection as rejection:
            result = rejection
        self.attempts[members] = result
        return result

    def start(self) -> None:
        for position, node in enumerate(self.graph.nodes):
            if isinstance(node, Def):
                built = self.build((position,))
                if isinstance(built, Rejection):
                    raise built
                self.groups[position] = _Group(position, (position,), *built)
        for group in list(self.groups.values()):
            self.push_neighbours(group)

    def neighbours(self, group: _Group) -> set[int]:
        """Return groups near ``group``: by an edge, a shared large buffer, or a like reduction."""
        found = {
            n
            for n in (*self.dag.successors(group.serial), *self.dag.predecessors(group.serial))
            if n in self.groups
        }
        for buffer in self.group_reads(group):
            if numel(buffer) * buffer.dtype.itemsize < SHARED_BYTES:
                continue
            readers = [self.owner(r) for r in self.uses.readers.get(buffer, ())]
            where = readers.index(group.serial)
            found.update(readers[max(0, where - SIBLINGS) : where + SIBLINGS + 1])
        found.update(self.alike(group))
        found.discard(group.serial)
        return found

    def group_reads(self, group: _Group) -> tuple[Buffer, ...]:
        nodes = (self.graph.nodes[i] for i in group.members)
        return tuple(dict.fromkeys(b for n in nodes for b in reads(n)))

    def owner(self, position: int) -> int:
        return self._owner.get(position, position)

    def alike(self, group: _Group) -> list[int]:
        """Return groups whose small final reductions have the shape of this group's."""
        signature = self.signature(group)
        if signature is None or len(group.members) >= MAX_ALIKE:
            return []
        same = [g.serial for g in self.groups.values() if self.signature(g) == signature]
        where = same.index(group.serial)
        return same[max(0, where - 2) : where + 3]

    def signature(self, group: _Group) -> tuple[object, ...] | None:
        if sum(self.touched(group).values()) > SMALL_BYTES or not group.kernel.inside:
            return None
        return tuple(a.extent for a in group.kernel.grid)

    # -- merging -----------------------------------------------------------------------------------

    def push_neighbours(self, group: _Group) -> None:
        """Queue the pairs of a group by what they could save at best; most are never built."""
        for other in self.neighbours(group):
            a, b = sorted((group.serial, other))
            if len(self.groups[a].members) + len(self.groups[b].members) <= MAX_DEFS:
                self.push(self.at_best(a, b), a, b, exact=False)

    def push(self, saved: float, a: int, b: int, *, exact: bool) -> None:
        heapq.heappush(self.queue, (-saved, a, b, exact))

    def at_best(self, a: int, b: int) -> float:
        """Return the most that a merge can save: a launch, and all traffic of what both touch."""
        ours, theirs = (self.touched(self.groups[g]) for g in (a, b))
        shared = sum(2 * size for buffer, size in ours.items() if buffer in theirs)
        return self.machine.launch_us + shared / self.machine.bytes_per_us

    def touched(self, group: _Group) -> dict[Buffer, int]:
        """Return the bytes of each buffer that a group reads or writes."""
        if group.touched is None:
            group.touched = {
                buffer: numel(buffer) * buffer.dtype.itemsize
                for buffer in (*self.group_reads(group), *(s.buffer for s in group.kernel.stores))
            }
        return group.touched

    def evaluate(self, a: int, b: int) -> float | None:
        """Return the time a merge saves, or None (with a decision) if it must not be."""
        if self.has_detour(a, b):
            self.decide(a, b, False, DETOUR, None)
            return None
        built = self.build(tuple(sorted((*self.groups[a].members, *self.groups[b].members))))
        if isinstance(built, Rejection):
            self.decide(a, b, False, built.reason, None)
            return None
        saved = self.groups[a].us + self.groups[b].us - built[1]
        if saved <= 0:
            self.decide(a, b, False, "modelled slower than two kernels", saved)
            return None
        return saved

    def run(self) -> None:
        """Merge the best pair until none is left that may and should be merged."""
        self._owner: dict[int, int] = {}
        self.start()
        while self.queue:
            _, a, b, exact = heapq.heappop(self.queue)
            if a not in self.groups or b not in self.groups:
                continue
            saved = self.evaluate(a, b)
            if saved is None:
                continue
            best_other = -self.queue[0][0] if self.queue else 0.0
            if exact or saved >= best_other:
                self.merge(a, b, saved)
            else:
                self.push(saved, a, b, exact=True)

    def merge(self, a: int, b: int, saved: float) -> None:
        members = tuple(sorted((*self.groups[a].members, *self.groups[b].members)))
        built = self.build(members)
        assert not isinstance(built, Rejection)
        self.decide(a, b, True, "axes unify", saved)
        serial = next(self.serial)
        predecessors = {*self.dag.predecessors(a), *self.dag.predecessors(b)} - {a, b}
        successors = {*self.dag.successors(a), *self.dag.successors(b)} - {a, b}
        self.dag.remove_nodes_from((a, b))
        self.dag.add_node(serial)
        self.dag.add_edges_from((p, serial) for p in predecessors)
        self.dag.add_edges_from((serial, s) for s in successors)
        del self.groups[a], self.groups[b]
        group = _Group(serial, members, *built)
        self.groups[serial] = group
        self._owner.update((m, serial) for m in members)
        self.push_neighbours(group)

    def has_detour(self, a: int, b: int) -> bool:
        """Return True if a path of several edges joins the two: merging would close a cycle."""
        for source, target in ((a, b), (b, a)):
            starts = [n for n in self.dag.successors(source) if n != target]
            seen = set(starts)
            while starts:
                node = starts.pop()
                if node == target:
                    return True
                for successor in self.dag.successors(node):
                    if successor not in seen:
                        seen.add(successor)
                        starts.append(successor)
        return False

    def decide(self, a: int, b: int, taken: bool, reason: str, saved: float | None) -> None:
        names = ["+".join(s.buffer.name for s in self.groups[g].kernel.stores) for g in (a, b)]
        self.decisions.append(Decision(names[0], names[1], taken, reason, saved))

    # -- result ------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Return kernels and externs in a topological order that stays close to the graph's own."""
        first = {g: min(group.members) for g, group in self.groups.items()}
        order = nx.lexicographical_topological_sort(self.dag, key=lambda n: first.get(n, n))
        steps: list[Kernel | Extern] = []
        count = itertools.count()
        for node in order:
            group = self.groups.get(node)
            if group is not None:
                steps.append(_named(group.kernel, f"k{next(count)}"))
            else:
                extern = self.graph.nodes[node]
                assert isinstance(extern, Extern)
                steps.append(extern)
        return Schedule(self.graph, tuple(steps))


def _named(kernel: Kernel, name: str) -> Kernel:
    return Kernel(
        name, kernel.grid, kernel.inside, kernel.stores, kernel.origin, kernel.defs, kernel.labels
    )


def fuse(
    graph: Graph, machine: Machine, accepts: Callable[[Kernel], bool]
) -> tuple[Schedule, tuple[Decision, ...]]:
    """Return the graph cut into kernels, and every merge that was considered.

    Args:
        accepts: whether the target's schedules can run a kernel.
    """
    fuser = _Fuser(graph, machine, accepts)
    fuser.run()
    return fuser.schedule(), tuple(fuser.decisions)


def separate(graph: Graph) -> Schedule:
    """Return a kernel for each definition: no fusion, for comparison and debugging."""
    count = itertools.count()
    steps: list[Kernel | Extern] = []
    for node in graph.nodes:
        if isinstance(node, Extern):
            steps.append(node)
        else:
            steps.append(unify((node,), frozenset((node.buffer,)), f"k{next(count)}"))
    return Schedule(graph, tuple(steps))
