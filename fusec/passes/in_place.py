"""Write results that are copied into an input at the end straight into its memory.

Spec: ``schedule -> schedule``. AOTAutograd ends a graph that changes its inputs with
``copy_(x, new)``. Where one kernel makes ``new``, it stores to ``x`` instead, and the copy goes: an
optimizer then reads and writes each tensor once, and a norm its running statistics. Legal if

1. ``new`` and ``x`` agree in shape and type, and nothing but kernels reads ``new``;
2. the kernel reads ``x`` only at the element that it writes, before it writes; one with loops
   writes there once for each point of its grid, and nothing but that store reads ``x``;
3. everything else that reads the old ``x`` can run before the kernel: those are new edges, and
   steps are sorted anew.

What is not legal stays a copy, at the end.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.disjoint import has_distinct_elements
from fusec.ir.expr import Buffer, loads
from fusec.ir.extern import Copy
from fusec.ir.graph import Extern, Kernel, Schedule, Step, Store, View
from fusec.ir.rewrite import Rewriter, reading
from fusec.passes.dag import below, dependencies, in_order, sorted_steps


def in_place(schedule: Schedule) -> Schedule:
    """Return the schedule with copies into inputs made stores of the kernels they copy from."""
    inputs = {b for b in schedule.graph.inputs if isinstance(b, Buffer)}
    copies = [s for s in schedule.steps if (c := whole_copy(s)) is not None and c[0] in inputs]
    if not copies:
        return schedule
    return _InPlace(schedule, copies).run()


def whole_copy(step: Step) -> tuple[Buffer, Buffer] | None:
    """Return (target, source) of a copy of one whole tensor over another."""
    match step:
        case Extern(effect=Copy(), args=(View() as target, View() as source, *_)):
            x, new = target.buffer, source.buffer
            same = x.shape == new.shape and x.dtype is new.dtype
            return (x, new) if same and target.is_whole and source.is_whole else None
    return None


class _InPlace:
    def __init__(self, schedule: Schedule, copies: list[Step]) -> None:
        self.schedule = schedule
        copied = set(copies)
        self.steps = [s for s in schedule.steps if s not in copied]
        self.copies = copies
        self.dag = dependencies(self.steps)
        self.kernels = {k: s for k, s in enumerate(self.steps) if isinstance(s, Kernel)}
        self.calls = set(schedule.externs)
        self.maker = {b: k for k, kernel in self.kernels.items() for b in kernel.writes}
        self.readers: dict[Buffer, set[int]] = {}
        self.held = set(schedule.graph.returned)
        for k, step in enumerate(self.steps):
            for buffer in step.reads:
                self.readers.setdefault(buffer, set()).add(k)
            if k not in self.kernels:
                self.held.update(step.reads)
        self.sources: dict[Buffer, int] = {}
        for copy in copies:
            for buffer in copy.reads:
                self.sources[buffer] = self.sources.get(buffer, 0) + 1
        self.taken: dict[Buffer, Buffer] = {}  # new -> x

    def run(self) -> Schedule:
        left = [copy for copy in self.copies if not self.take(copy)]
        if len(left) == len(self.copies):
            return self.schedule
        rewriter = Rewriter(reading(self.taken))
        new = {k: self._rewritten(kernel, rewriter) for k, kernel in self.kernels.items()}
        order = sorted_steps(self.dag)
        return replace(self.schedule, steps=(*(new.get(k, self.steps[k]) for k in order), *left))

    def take(self, copy: Step) -> bool:
        """Note that a copy can go, and the order it asks for; False if it cannot."""
        pair = whole_copy(copy)
        assert pair is not None
        x, new = pair
        position = self.maker.get(new)
        # Each copy reads its target and its source: more readers than one see another's write.
        if position is None or new in self.held or self.sources[x] > 1 or self.sources[new] > 1:
            return False
        kernel = self.kernels[position]
        if self._is_aliased(x) or not has_distinct_elements(x) or not self._fits(kernel, x, new):
            return False
        others = self.readers.get(x, set()) - {position}
        if others and not others.isdisjoint(below(self.dag, {position})):
            return False
        self.dag.add_edges_from((other, position) for other in others)
        self.taken[new] = x
        return True

    def _is_aliased(self, x: Buffer) -> bool:
        """Return True if an eager kernel takes the tensor: it may write it or keep a view."""
        return any(self.steps[k] in self.calls for k in self.readers.get(x, ()))

    def _fits(self, kernel: Kernel, x: Buffer, new: Buffer) -> bool:
        """Return True if a kernel may write ``x`` where it writes ``new``."""
        store, *others = (s for s in kernel.stores if s.buffer is new)
        if others or not _is_point(kernel, store, x):
            return False
        read = [n for n in loads(s.expr for s in kernel.stores) if n.buffer is x]
        if any(n.indices != store.indices or n.guard is not None for n in read):
            return False
        return _store_order(kernel, {**self.taken, new: x}) is not None

    def _rewritten(self, step: Kernel, rewriter: Rewriter) -> Kernel:
        order = _store_order(step, self.taken)
        assert order is not None
        stores = (replace(s, buffer=self.taken.get(s.buffer, s.buffer)) for s in order)
        return replace(step, stores=tuple(stores)).map(rewriter)


def _is_point(kernel: Kernel, store: Store, x: Buffer) -> bool:
    """Return True if each point of the grid reads ``x`` before it writes there, whatever its loops.

    Loops take the kernel's stores in an order of their own: no other one may read ``x``.
    """
    if not kernel.inside:
        return True
    others = loads(s.expr for s in kernel.stores if s is not store)
    steady = all(i.axes.isdisjoint(kernel.inside) for i in store.indices)
    return steady and all(n.buffer is not x for n in others)


def _store_order(kernel: Kernel, taken: dict[Buffer, Buffer]) -> tuple[Store, ...] | None:
    """Return the stores, each that reads an input before the one that writes it; None if none."""
    writer = {taken[s.buffer]: k for k, s in enumerate(kernel.stores) if s.buffer in taken}
    if not writer:
        return kernel.stores
    edges = [
        (k, writer[load.buffer])
        for k, store in enumerate(kernel.stores)
        for load in loads((store.expr,))
        if writer.get(load.buffer, k) != k
    ]
    order = in_order(len(kernel.stores), edges)
    return None if order is None else tuple(kernel.stores[k] for k in order)
