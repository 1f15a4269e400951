"""Write a part of an input where it lies: the next position of a cache, say.

Spec: ``schedule -> schedule``. AOTAutograd says ``x[:, p] = k`` as ``new = slice_scatter(x, k)``,
or ``index_put`` or ``scatter``, reads ``new`` instead of ``x`` from there on, and ends with
``copy_(x, new)``: two copies of the whole. Here the call writes into x, whoever reads ``new`` reads
x, and the copy goes. Where the part is a window and a kernel makes its contents, the kernel stores
them there and no call is left. Several such calls, each on the result of the one before, are as
many writes. Legal if

1. all results have x's layout, and the graph returns none of them;
2. what reads x, or a result that is written over, can run before: those are new edges;
3. no other eager kernel takes these: it may keep a view;
4. what is written is no part of x, nor does a kernel that stores it read x.

What is not legal stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir.argument import whole_view
from fusec.ir.disjoint import has_distinct_elements
from fusec.ir.expr import Buffer
from fusec.ir.extern import Copy, Update, Window, WindowUpdate, Write
from fusec.ir.graph import Extern, Kernel, RowLoop, Schedule, Step, Store, View
from fusec.ir.index import index, is_in_range
from fusec.ir.rewrite import Rewriter, reading
from fusec.passes.dag import below, dependencies, sorted_steps
from fusec.passes.in_place import whole_copy

_REASON = "writes a part of an input in place"


def write_parts(schedule: Schedule) -> Schedule:
    """Return the schedule in which inputs are changed in places, not copied as a whole."""
    inputs = {b for b in schedule.graph.inputs if isinstance(b, Buffer)}
    copies = [s for s in schedule.steps if (c := whole_copy(s)) is not None and c[0] in inputs]
    if not any(_base(call) for call in schedule.externs):
        return schedule
    return _WriteParts(schedule, copies).run()


def _base(call: Extern) -> View | None:
    """Return the tensor of which a call returns a copy, changed in places; None if it does not."""
    match call:
        case Extern(effect=WindowUpdate() | Update(), args=(View() as base, *_)):
            return base
    return None


class _WriteParts:
    def __init__(self, schedule: Schedule, copies: list[Step]) -> None:
        self.schedule = schedule
        self.steps: list[Step | None] = list(schedule.steps)
        self.copies = copies
        self.dag = dependencies(schedule.steps)
        self.returned = schedule.graph.returned
        self.place = {step: k for k, step in enumerate(schedule.steps)}
        self.kernels = {self.place[kernel]: kernel for kernel in schedule.kernels}
        self.calls = {self.place[call]: call for call in schedule.externs}
        self.maker: dict[Buffer, int] = {}
        self.readers: dict[Buffer, set[int]] = {}
        for k, step in enumerate(schedule.steps):
            self.maker.update((buffer, k) for buffer in step.writes)
            for buffer in step.reads:
                self.readers.setdefault(buffer, set()).add(k)
        self.renamed: dict[Buffer, Buffer] = {}
        self.stored: set[Buffer] = set()
        self.parts: dict[Store, tuple[Store, bool]] = {}  # and whether nobody else reads the first

    def run(self) -> Schedule:
        taken = [self.take(copy) for copy in self.copies]
        if not any(taken):
            return self.schedule
        rewriter = Rewriter(reading(self.renamed))
        order = sorted_steps(self.dag)
        steps = [self._rewritten(step, rewriter) for k in order if (step := self.steps[k])]
        return replace(self.schedule, steps=tuple(steps))

    # -- what is legal ----------------------------------------------------------------------------

    def take(self, copy: Step) -> bool:
        """Note that the writes behind a copy go into its target; False if they cannot."""
        pair = whole_copy(copy)
        assert pair is not None
        x, chain = pair[0], self._chain(*pair)
        if not chain or not has_distinct_elements(x):
            return False
        last = self.place[copy]
        versions = [x, *(made for k in chain for made in self.calls[k].writes)]
        ahead = {
            k: self.readers.get(version, set()) - {k, last}
            for k, version in zip(chain, versions, strict=False)
        }
        for k, before in ahead.items():
            if any(view.buffer in versions for view in self.calls[k].views[1:]):
                return False
            if not before.isdisjoint(self.calls):
                return False
            if not before.isdisjoint(below(self.dag, {k})):
                return False
        for k, before in ahead.items():
            self.dag.add_edges_from((reader, k) for reader in before)
        for k, whole in zip(chain, versions, strict=False):
            self._write(k, versions, whole, ahead[k])
        self.renamed.update((version, x) for version in versions[1:])
        self.steps[last] = None
        return True

    def _chain(self, x: Buffer, new: Buffer) -> list[int]:
        """Return the calls that lead from ``x`` to ``new``, in order; none if not all are known."""
        chain: list[int] = []
        version = new
        while version is not x:
            position = self.maker.get(version)
            call = None if position is None else self.calls.get(position)
            base = None if call is None else _base(call)
            if position is None or base is None or version in self.returned:
                return []
            same = version.strides == x.strides and version.dtype is x.dtype
            if not base.is_whole or not same:
                return []
            chain.append(position)
            version = base.buffer
        return chain[::-1]

    # -- writes -----------------------------------------------------------------------------------

    def _write(
        self, position: int, versions: list[Buffer], whole: Buffer, before: set[int]
    ) -> None:
        """Put a write into the input in the place of one call."""
        call, x = self.calls[position], versions[0]
        written = replace(call, outputs=(), reason=_REASON, impure=True)
        match call.effect, call.args:
            case Update() as update, (_, *others):
                args = (whole_view(x), *others)
                effect = Write(update.moved)
                self.steps[position] = replace(
                    written, target=update.in_place, args=args, effect=effect
                )
            case WindowUpdate() as update, (_, View() as part, *_):
                previous = {self.maker[whole]} if whole in self.maker else set()
                if self._store(position, versions, update.window, part, before | previous):
                    self.steps[position] = None
                    return
                args = (update.window.view(x, part.shape), part)
                self.steps[position] = replace(
                    written, target=update.copied, args=args, kwargs=(), effect=Copy()
                )

    def _store(
        self,
        position: int,
        versions: list[Buffer],
        window: Window,
        part: View,
        before: set[int],
    ) -> bool:
        """Let the kernel that makes a part store it in the input; False if it cannot."""
        x, made = versions[0], part.buffer
        maker, axes = self.maker.get(made), _axes_of(part)
        kernel = None if maker is None else self.kernels.get(maker)
        if maker is None or axes is None or kernel is None:
            return False
        if made.dtype is not x.dtype or x in self.stored or set(versions) & set(kernel.reads):
            return False
        if not before.isdisjoint({maker, *below(self.dag, {maker})}):
            return False
        store, *more = (s for s in kernel.stores if s.buffer is made)
        if more:  # a cat, stored in pieces
            return False
        at = window.indices(tuple(index(0) if k is None else store.indices[k] for k in axes))
        if not all(map(is_in_range, at, x.shape)):
            return False
        self.dag.add_edges_from((other, maker) for other in before)
        self.stored.add(x)
        alone = made not in self.returned and self.readers[made] == {position}
        self.parts[store] = (Store(x, at, store.expr), alone)
        return True

    # -- the new schedule -------------------------------------------------------------------------

    def _rewritten(self, step: Step, rewriter: Rewriter) -> Step:
        match step:
            case Kernel():
                return replace(step, stores=self._with_parts(step.stores)).map(rewriter)
            case Extern() | RowLoop():
                return step.reading(self.renamed)
            case _:
                return step

    def _with_parts(self, stores: tuple[Store, ...]) -> tuple[Store, ...]:
        """Return a kernel's stores with those into inputs, which may stand in the place of some."""
        found: list[Store] = []
        for store in stores:
            part, alone = self.parts.get(store, (None, False))
            found += [] if alone else [store]
            found += [] if part is None else [part]
        return tuple(found)


def _axes_of(view: View) -> tuple[int | None, ...] | None:
    """Return which axis of its buffer each axis of a view is, None for one element alone.

    None if the view is not all of the buffer with its axes in some order.
    """
    buffer = view.buffer
    left = [k for k, extent in enumerate(buffer.shape) if extent is not index(1)]
    found: list[int | None] = []
    for extent, stride in zip(view.shape, view.strides, strict=True):
        if extent is index(1):
            found.append(None)
            continue
        same = [k for k in left if buffer.shape[k] is extent and buffer.strides[k] is stride]
        if len(same) != 1:
            return None
        left.remove(same[0])
        found.append(same[0])
    return None if left or view.offset is not index(0) else tuple(found)
