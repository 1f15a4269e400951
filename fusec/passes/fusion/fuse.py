"""Greedy fusion: ``unify`` decides legality, the cost model in ``cost`` the order, best pair first.

Every definition starts as a kernel of its own. A priority queue holds candidate pairs (producer and
consumer, two consumers of one large buffer, two reductions of one shape), ordered by modelled
microseconds saved. The best pair is merged if the graph stays acyclic, ``unify`` accepts it and the
merged kernel is modelled faster than the two apart; the pairs with its neighbours are then
evaluated again. A pair that shares much data may have other groups on paths between the two, such
as sums of sums: all merge at once. Every merge taken or rejected leaves a ``Decision``.

An estimate or a rejection holds for all groups that are equal up to their buffers and axes
(``ir.canonical``): the layers of a deep model are unified and estimated once. Only the groups left
at the end become kernels one by one.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import networkx as nx

from fusec.errors import InternalError
from fusec.ir.canonical import Leaf, canonical, common
from fusec.ir.contraction import multiplied
from fusec.ir.decision import Decision
from fusec.ir.expr import Buffer, loads, reductions
from fusec.ir.graph import Def, Graph, Kernel, Schedule, Step
from fusec.ir.index import Axis, Index, product
from fusec.ir.machine import Machine
from fusec.ir.streamed import stored_rows
from fusec.passes.dag import TopologicalOrder, dependencies, find_uses
from fusec.passes.fusion.cost import buffer_bytes, kernel_cost
from fusec.passes.fusion.resolve import Learned, Rejection, axes_of_line
from fusec.passes.fusion.unify import unify

DETOUR = "merging would close a cycle through what stands between the two"
EPILOGUE = "computed once, in the kernel of the product that it follows"
ROWS = "computed once: the product's columns would each compute these rows again"
TOO_LARGE = "too large to compile quickly"


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Estimate of a candidate kernel, valid for all kernels of the same canonical form.

    Attributes:
        us: modelled time.
        grid: extents of the grid axes.
        inside: whether the kernel has inside axes.
    """

    us: float
    grid: tuple[Index, ...]
    inside: bool


@dataclass(slots=True, eq=False)
class _Group:
    """Definitions that become one kernel.

    Attributes:
        members: positions of its definitions, in execution order.
        stored: buffers that are needed outside.
        touched: buffer that it reads or writes -> bytes.
        alike: groups with equal ``alike`` may be paired by shape alone; None: never.
    """

    serial: int
    members: tuple[int, ...]
    nodes: int
    estimate: _Estimate
    stored: tuple[Buffer, ...]
    touched: dict[Buffer, int]
    alike: tuple[Index, ...] | None


@dataclass(frozen=True, slots=True)
class EstimateMemo:
    """Memo of estimates and rejections of groups, by canonical form.

    It is valid for one machine and any graph: ``contract`` fuses many variants of one graph.

    Attributes:
        kinds: canonical form of a definition -> number.
        known: numbers of a group's definitions, and what these share -> estimate or rejection.
    """

    kinds: dict[object, int] = field(default_factory=dict)
    known: dict[tuple[object, ...], _Estimate | tuple[str | int, ...]] = field(default_factory=dict)


class _Fuser:
    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        accepts: Callable[[Kernel], bool],
        judged: EstimateMemo,
    ) -> None:
        self.graph = graph
        self.machine, self.tuning = machine, machine.fusion
        self.accepts = accepts
        self.uses = find_uses(graph)
        self.order = TopologicalOrder(dependencies(graph.nodes))
        self.serial = itertools.count(len(graph.nodes))
        self.groups: dict[int, _Group] = {}
        self.owner: dict[int, int] = {}
        self.alike: dict[tuple[Index, ...], list[int]] = {}
        self.queue: list[tuple[float, int, int, bool]] = []
        self.decisions: list[Decision] = []
        self.merges = 0
        self.too_large: dict[tuple[int, int], None] = {}
        self.definitions = {k: n for k, n in enumerate(graph.nodes) if isinstance(n, Def)}
        self.lines = {k: canonical(line) for k, line in self.definitions.items()}
        made = {k: multiplied(line.expr) for k, line in self.definitions.items()}
        self.products = {k: buffers for k, buffers in made.items() if buffers is not None}
        self.rows = {k: self.rows_of(line) for k, line in self.definitions.items()}
        self.buffers = {k: line.of_kind(Buffer) for k, line in self.lines.items()}
        self.reads = {k: line.reads for k, line in self.definitions.items()}
        kinds, self.known = judged.kinds, judged.known
        forms = {k: (c.form, *map(_described, c.leaves)) for k, c in self.lines.items()}
        self.kind = {k: kinds.setdefault(form, len(kinds)) for k, form in forms.items()}
        self.attempts: dict[tuple[int, ...], _Estimate | str] = {}
        self.learned = Learned()
        self.made: dict[tuple[int, ...], Kernel] = {}

    # -- pieces ------------------------------------------------------------------------------------

    def defs(self, members: tuple[int, ...]) -> tuple[Def, ...]:
        return tuple(self.definitions[k] for k in members)

    def rows_of(self, line: Def) -> frozenset[Buffer]:
        """Return the buffers of rows that a CPU's products read stored."""
        sums = reductions(line.expr) if self.machine.is_cpu else ()
        found = (stored_rows(n, self.machine, computed=False) for n in sums)
        return frozenset(n.buffer for n in loads(few for few in found if few is not None))

    def stored(self, members: tuple[int, ...]) -> tuple[Buffer, ...]:
        """Return the buffers of ``members`` that are needed outside of them."""
        inner = set(members)
        return tuple(
            d.buffer
            for d in self.defs(members)
            if d.buffer in self.uses.live_out
            or any(r not in inner for r in self.uses.readers.get(d.buffer, ()))
        )

    def build(self, members: tuple[int, ...]) -> _Estimate | str:
        """Return the estimate of definitions as one kernel, or the reason why they are rejected.

        Memoised for all groups of the same form: equal layers of a model are estimated once.
        """
        estimate = self.attempts.get(members)
        if estimate is None:
            stored = self.stored(members)
            needed = tuple(d.buffer in stored for d in self.defs(members))
            kinds = tuple(map(self.kind.__getitem__, members))
            key = (needed, kinds, common([self.lines[k] for k in members]))
            buffers = list(dict.fromkeys(b for k in members for b in self.buffers[k]))
            if key not in self.known:
                self.known[key] = self.judge(members, stored, buffers)
            judged = self.known[key]
            estimate = judged if isinstance(judged, _Estimate) else _named(judged, buffers)
            self.attempts[members] = estimate
        return estimate

    def judge(
        self, members: tuple[int, ...], stored: tuple[Buffer, ...], buffers: list[Buffer]
    ) -> _Estimate | tuple[str | int, ...]:
        """Unify and estimate; a rejection refers to buffers by their position in ``buffers``."""
        try:
            made = {d.buffer for d in self.defs(members)}
            if any(not made.isdisjoint(self.rows[k]) for k in members):
                raise Rejection(ROWS)
            kernel = unify(self.defs(members), frozenset(stored), learned=self.learned)
            if len(members) > 1 and not self.accepts(kernel):
                raise Rejection("no schedule of the target runs both as one kernel")
        except Rejection as rejection:
            parts = rejection.parts
            return tuple(buffers.index(p) if isinstance(p, Buffer) else p for p in parts)
        if self.has_own_axes(kernel, members):
            self.made[members] = kernel
        us = kernel_cost(kernel, self.machine).us
        return _Estimate(us, tuple(a.extent for a in kernel.grid), bool(kernel.inside))

    def has_own_axes(self, kernel: Kernel, members: tuple[int, ...]) -> bool:
        """Return True if no axis of a kernel was created by a unification (``Learned.cuts``).

        A unification with an empty memo would then return the same kernel.
        """
        lines = self.defs(members)
        return set(kernel.axes) <= {a for d in lines for a in axes_of_line(d.axes, d.expr)}

    def start(self) -> None:
        for position in self.lines:
            built = self.build((position,))
            if isinstance(built, str):
                raise Rejection(built)
            self.add(position, (position,), built)
        for group in list(self.groups.values()):
            self.push_neighbours(group)

    def add(self, serial: int, members: tuple[int, ...], estimate: _Estimate) -> _Group:
        stored = self.stored(members)
        buffers = (*(b for k in members for b in self.reads[k]), *stored)
        touched = {b: buffer_bytes(b) for b in dict.fromkeys(buffers)}
        small = estimate.inside and sum(touched.values()) <= self.tuning.alike_bytes
        nodes = sum(self.lines[k].nodes for k in members)
        alike = estimate.grid if small else None
        group = _Group(serial, members, nodes, estimate, stored, touched, alike)
        self.groups[serial] = group
        self.owner.update(dict.fromkeys(members, serial))
        if alike is not None:
            self.alike.setdefault(alike, []).append(serial)  # serials grow: it stays sorted
        return group

    def remove(self, serial: int) -> _Group:
        group = self.groups.pop(serial)
        if group.alike is not None:
            same = self.alike[group.alike]
            del same[bisect.bisect_left(same, serial)]
        return group

    # -- pairs -------------------------------------------------------------------------------------

    def neighbours(self, group: _Group) -> set[int]:
        """Return groups that may merge: by an edge, a large shared buffer, or like reductions."""
        dag = self.order.dag
        edges = (*dag.successors(group.serial), *dag.predecessors(group.serial))
        found = {n for n in edges if n in self.groups}
        first: dict[Buffer, int] = {}
        for member in group.members:
            for buffer in self.reads[member]:
                first.setdefault(buffer, member)
        for buffer, member in first.items():
            if group.touched[buffer] >= self.tuning.min_reused_input_bytes:
                found.update(self.near_readers(buffer, member))
        found.update(self.groups_alike(group))
        found.discard(group.serial)
        return found

    def near_readers(self, buffer: Buffer, reader: int) -> list[int]:
        """Return the groups of the consumers of a buffer that are nearest to one of them."""
        readers, near = self.uses.readers[buffer], self.tuning.siblings
        where = bisect.bisect_left(readers, reader)
        return [self.owner[r] for r in readers[max(0, where - near) : where + near + 1]]

    def groups_alike(self, group: _Group) -> list[int]:
        """Return the nearest groups of small reductions with the shape of this group's."""
        if group.alike is None or len(group.members) >= self.tuning.alike:
            return []
        same = self.alike[group.alike]
        where = bisect.bisect_left(same, group.serial)
        return same[max(0, where - 2) : where + 3]

    def push_neighbours(self, group: _Group) -> None:
        """Queue the pairs of a group by an upper bound of their saving; most are never built."""
        for other in self.neighbours(group):
            a, b = sorted((group.serial, other))
            if self.is_too_large(a, b):
                self.too_large[a, b] = None
            else:
                self.push(self.at_best(a, b), a, b, exact=False)

    def is_too_large(self, *groups: int) -> bool:
        """Return True if groups have too many definitions, or nodes, for one kernel."""
        found = [self.groups[group] for group in groups]
        defs, nodes = sum(len(g.members) for g in found), sum(g.nodes for g in found)
        return defs > self.tuning.kernel_definitions or nodes > self.tuning.kernel_nodes

    def push(self, saved: float, a: int, b: int, *, exact: bool) -> None:
        heapq.heappush(self.queue, (-saved, a, b, exact))

    def at_best(self, a: int, b: int) -> float:
        """Return an upper bound of a merge's saving: a launch, and all traffic of shared data."""
        ours, theirs = self.groups[a].touched, self.groups[b].touched
        shared = sum(2 * size for buffer, size in ours.items() if buffer in theirs)
        return self.machine.launch_us + shared / self.machine.bytes_per_us

    # -- merging -----------------------------------------------------------------------------------

    def all(self, groups: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(k for group in groups for k in self.groups[group].members))

    def with_detours(self, a: int, b: int) -> tuple[int, ...] | None:
        """Return two groups with those on paths between them, in order; None if they are too many.

        Groups between a large producer and its large consumer are often small, such as a statistic.
        """
        if not self.order.has_detour(a, b):
            return a, b
        if self.at_best(a, b) < self.tuning.detour_launches * self.machine.launch_us:
            return None
        between = self.order.on_detours(a, b)
        if len(between) > self.tuning.between or any(n not in self.groups for n in between):
            return None
        first, last = sorted((a, b), key=self.order.position.__getitem__)
        return first, *between, last

    def is_busy(self, built: _Estimate | str) -> bool:
        """Return True for a kernel with grid points for three of four units of the machine.

        A kernel merged across a detour sweeps its rows again: from a cache, if all units share the
        work.
        """
        if isinstance(built, str):
            return False
        return 4 * product(built.grid).hint() >= 3 * self.machine.units

    def belongs_to_another(self, a: int, b: int) -> bool:
        """Return True if one group is another product's epilogue, and the other multiplies it.

        As an epilogue it is computed once, as an operand for each tile of columns. If the groups of
        both products are to merge they do so afterwards.
        """
        if self.machine.is_cpu:
            return False
        for one, other in ((a, b), (b, a)):
            made, read = self.multiplied(one), self.multiplied(other)
            if made is None and read is not None and not read.isdisjoint(self.groups[one].stored):
                before = set(self.order.dag.predecessors(one)) & self.groups.keys() - {other}
                if any(self.has_epilogue(group, one) for group in before):
                    return True
        return False

    def multiplied(self, group: int) -> frozenset[Buffer] | None:
        """Return the buffers that the products of a group multiply; None if it has no product."""
        found = [self.products[k] for k in self.groups[group].members if k in self.products]
        return frozenset[Buffer]().union(*found) if found else None

    def has_epilogue(self, a: int, b: int) -> bool:
        """Return True if group a has products, and one kernel is faster that computes b as well."""
        if self.multiplied(a) is None or self.order.has_detour(a, b):
            return False
        built = self.build(self.all((a, b)))
        apart = self.groups[a].estimate.us + self.groups[b].estimate.us
        return not isinstance(built, str) and built.us < apart

    def evaluate(self, a: int, b: int) -> tuple[float, tuple[int, ...]] | None:
        """Return the time that a merge saves, and its groups, or record a rejection.

        Where it saves nothing, one with a group before or behind the two may.
        """
        found = self.with_detours(a, b)
        if found is None:
            self.decide(a, b, False, DETOUR, None)
            return None
        if self.belongs_to_another(a, b):
            self.decide(a, b, False, EPILOGUE, None)
            return None
        built = self.build(self.all(found))
        if len(found) > 2 and not self.is_busy(built):
            built = DETOUR
        if isinstance(built, str):
            self.decide(a, b, False, built, None)
            return None
        saved = self.saved(found, built)
        if saved > 0:
            return saved, found
        self.decide(a, b, False, "modelled slower than two kernels", saved)
        longer = ((self.saved(path, self.build(self.all(path))), path) for path in self.paths(a, b))
        best = max(longer, default=(0.0, ()))
        return best if best[0] > 0 else None

    def saved(self, found: tuple[int, ...], built: _Estimate | str) -> float:
        """Return the time that a merge of groups saves; less than nothing if it is rejected."""
        if isinstance(built, str):
            return -math.inf
        apart = sum(self.groups[group].estimate.us for group in found)
        # Groups on a detour might merge into one kernel otherwise: count one launch for them.
        return apart - self.machine.launch_us * max(0, len(found) - 3) - built.us

    def paths(self, a: int, b: int) -> Iterator[tuple[int, ...]]:
        """Yield a group and its reader with a third before or behind them, between two products.

        Products of few rows are cut into many programs, and each would need all of a softmax's
        rows: that pays with neither of an attention's two products, but with both::

            s[j] = sum(c: q * k)    w[j] = exp(s[j] - m) / l    y[c] = sum(j: w * v)
        """
        first, last = sorted((a, b), key=self.order.position.__getitem__)
        before, behind = self.order.dag.predecessors(first), self.order.dag.successors(last)
        for one, other in (*((n, last) for n in before), *((first, n) for n in behind)):
            ends = {one, other} & self.groups.keys()
            if len(ends) == 2 and all(self.multiplied(n) is not None for n in ends):
                path = (one, *self.order.on_detours(one, other), other)
                if {*path} == {one, other, a, b} and not self.is_too_large(*path):
                    yield path

    def run(self, limit: int) -> None:
        """Merge the best pair while one is legal and profitable, at most ``limit`` times."""
        self.start()
        while self.queue and self.merges < limit:
            _, a, b, exact = heapq.heappop(self.queue)
            if a not in self.groups or b not in self.groups:
                continue
            evaluated = self.evaluate(a, b)
            if evaluated is None:
                continue
            saved, found = evaluated
            best_other = -self.queue[0][0] if self.queue else 0.0
            if exact or saved >= best_other:
                self.merge(found, saved)
            else:
                self.push(saved, a, b, exact=True)
        for a, b in self.too_large:
            if a in self.groups and b in self.groups:
                self.decide(a, b, False, TOO_LARGE, None)

    def merge(self, found: tuple[int, ...], saved: float) -> None:
        members = self.all(found)
        built = self.build(members)
        assert isinstance(built, _Estimate)
        self.decide(found[0], found[-1], True, "axes unify", saved)
        self.merges += 1
        serial, *others = found
        for other in others:
            merged = next(self.serial)
            self.order.merge(serial, other, merged)
            serial = merged
        for group in found:
            self.remove(group)
        self.push_neighbours(self.add(serial, members, built))

    def decide(self, a: int, b: int, taken: bool, reason: str, saved: float | None) -> None:
        names = ["+".join(x.name for x in self.groups[g].stored) for g in (a, b)]
        self.decisions.append(Decision(names[0], names[1], taken, reason, saved))

    # -- result ------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Return kernels and externs in a topological order close to the order of the graph."""
        first = {g: min(group.members) for g, group in self.groups.items()}
        order = nx.lexicographical_topological_sort(self.order.dag, key=lambda n: first.get(n, n))
        steps: list[Step] = []
        count = itertools.count()
        for node in order:
            group = self.groups.get(node)
            if group is not None:
                steps.append(self.kernel(group, f"k{next(count)}"))
            else:
                match self.graph.nodes[node]:
                    case Def() as line:
                        raise InternalError(f"{line.buffer} has no kernel", stage="passes.fuse")
                    case call:
                        steps.append(call)
        return Schedule(self.graph, tuple(steps), (*self.graph.decisions, *self.decisions))

    def kernel(self, group: _Group, name: str) -> Kernel:
        made = self.made.get(group.members)
        if made is not None:
            return replace(made, name=name)
        try:
            return unify(self.defs(group.members), frozenset(group.stored), name)
        except Rejection as rejection:  # a group of the same form has been accepted
            raise InternalError(f"{name}: {rejection.reason}", stage="passes.fuse") from rejection


def _described(leaf: Leaf) -> object:
    """Return the facts of a leaf that an estimate depends on: not which buffer it is."""
    match leaf:
        case Buffer():
            return leaf.shape, leaf.strides
        case Axis():
            return leaf.name
        case _:
            return leaf


def _named(reason: tuple[str | int, ...], buffers: list[Buffer]) -> str:
    return "".join(buffers[p].name if isinstance(p, int) else p for p in reason)


def fuse(
    graph: Graph,
    machine: Machine,
    accepts: Callable[[Kernel], bool],
    limit: int = 1 << 30,
    judged: EstimateMemo | None = None,
) -> Schedule:
    """Return the graph cut into kernels, with every merge that was considered.

    Args:
        accepts: whether the target's schedules can run a kernel.
        limit: most merges to take, the best first.
        judged: memo of estimates, which is extended.
    """
    fuser = _Fuser(graph, machine, accepts, EstimateMemo() if judged is None else judged)
    fuser.run(limit)
    return fuser.schedule()


def separate(graph: Graph) -> Schedule:
    """Return the graph with a kernel for each definition: no fusion, for debugging."""
    count = itertools.count()
    steps: list[Step] = []
    for node in graph.nodes:
        match node:
            case Def():
                steps.append(unify((node,), frozenset((node.buffer,)), f"k{next(count)}"))
            case _:
                steps.append(node)
    return Schedule(graph, tuple(steps), graph.decisions)
