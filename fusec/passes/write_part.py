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

from dataclasses import dataclass, replace

from fusec.ir.disjoint import has_distinct_elements
from fusec.ir.expr import Buffer
from fusec.ir.graph import (
    Argument,
    Chunked,
    Extern,
    Kernel,
    Schedule,
    SizeValue,
    Step,
    Store,
    View,
    argument_views,
    extern_views,
)
from fusec.ir.index import Index, index, is_in_range, product
from fusec.ir.rewrite import Rewriter, reading
from fusec.passes.dag import below, sorted_steps, step_dependencies, step_reads
from fusec.passes.in_place import COPY, is_whole, whole_copy

_WINDOWS = ("aten.slice_scatter.default", "aten.select_scatter.default")
_CALLS = {
    "aten.index_put.default": "aten.index_put_.default",
    "aten._unsafe_index_put.default": "aten.index_put_.default",
    "aten.index_copy.default": "aten.index_copy_.default",
    "aten.index_add.default": "aten.index_add_.default",
    "aten.scatter.src": "aten.scatter_.src",
    "aten.scatter.value": "aten.scatter_.value",
    "aten.scatter_add.default": "aten.scatter_add_.default",
}
"""Calls that return their first argument changed in places, and those that change it."""
_REASON = "writes a part of an input in place"


def write_parts(schedule: Schedule) -> Schedule:
    """Return the schedule in which inputs are changed in places, not copied as a whole."""
    inputs = {b for b in schedule.graph.inputs if isinstance(b, Buffer)}
    copies = [s for s in schedule.steps if (c := whole_copy(s)) is not None and c[0] in inputs]
    if not any(isinstance(s, Extern) and s.target in (*_WINDOWS, *_CALLS) for s in schedule.steps):
        return schedule
    return _WriteParts(schedule, copies).run()


@dataclass(frozen=True, slots=True)
class _Window:
    """Where a part lies in the whole: along ``axis`` from ``start`` on, or there alone."""

    axis: int
    start: Index
    step: Index
    is_slice: bool

    def indices(self, at: tuple[Index, ...]) -> tuple[Index, ...]:
        """Return the whole's indices of the part's element at ``at``."""
        before, after = at[: self.axis], at[self.axis :]
        if self.is_slice:
            return (*before, self.start + after[0] * self.step, *after[1:])
        return (*before, self.start, *after)

    def view(self, whole: Buffer, shape: tuple[Index, ...]) -> View:
        """Return the part as a window into the whole."""
        k, strides = self.axis, whole.strides
        along = (strides[k] * self.step,) if self.is_slice else ()
        kept = (*strides[:k], *along, *strides[k + 1 :])
        return View(whole, shape, kept, self.start * strides[k])


def _window(call: Extern, whole: Buffer) -> _Window:
    """Return the window that a ``slice_scatter`` or ``select_scatter`` replaces."""
    is_slice = call.target == _WINDOWS[0]
    named = dict(call.kwargs)
    axis, start, _, step = (
        call.args[k] if k < len(call.args) else named.get(name)
        for k, name in enumerate(("dim", "start" if is_slice else "index", "end", "step"), 2)
    )
    k = axis if isinstance(axis, int) else 0
    first = _integer(start, 0)
    first = first + whole.shape[k] if first.hint() < 0 else first
    return _Window(k % len(whole.shape), first, _integer(step, 1), is_slice)


def _integer(arg: Argument, default: int) -> Index:
    if isinstance(arg, SizeValue):
        return arg.index
    return index(arg if isinstance(arg, int) else default)


class _WriteParts:
    def __init__(self, schedule: Schedule, copies: list[Step]) -> None:
        self.schedule = schedule
        self.steps: list[Step | None] = list(schedule.steps)
        self.copies = copies
        self.dag = step_dependencies(schedule.steps)
        self.returned = {v.buffer for v in argument_views(schedule.graph.outputs)}
        self.maker: dict[Buffer, int] = {}
        self.readers: dict[Buffer, set[int]] = {}
        for k, step in enumerate(schedule.steps):
            made = [s.buffer for s in step.stores] if isinstance(step, Kernel) else []
            made += [b for b in step.outputs if b is not None] if isinstance(step, Extern) else []
            self.maker.update((buffer, k) for buffer in made)
            for buffer in step_reads(step):
                self.readers.setdefault(buffer, set()).add(k)
        self.place = {step: k for k, step in enumerate(schedule.steps)}
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
        versions = [x, *(self._made(k) for k in chain)]
        ahead = {
            k: self.readers.get(version, set()) - {k, last}
            for k, version in zip(chain, versions, strict=False)
        }
        for k, before in ahead.items():
            call = self.steps[k]
            assert isinstance(call, Extern)
            if any(view.buffer in versions for view in extern_views(call)[1:]):
                return False
            if any(isinstance(self.steps[r], Extern) for r in before):
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

    def _made(self, position: int) -> Buffer:
        call = self.steps[position]
        assert isinstance(call, Extern) and call.outputs[0] is not None
        return call.outputs[0]

    def _chain(self, x: Buffer, new: Buffer) -> list[int]:
        """Return the calls that lead from ``x`` to ``new``, in order; none if not all are known."""
        chain: list[int] = []
        version = new
        while version is not x:
            position = self.maker.get(version)
            call = None if position is None else self.steps[position]
            if position is None or not isinstance(call, Extern) or version in self.returned:
                return []
            base = call.args[0] if call.target in (*_WINDOWS, *_CALLS) else None
            same = version.strides == x.strides and version.dtype is x.dtype
            if not isinstance(base, View) or not is_whole(base) or not same:
                return []
            chain.append(position)
            version = base.buffer
        return chain[::-1]

    # -- writes -----------------------------------------------------------------------------------

    def _write(
        self, position: int, versions: list[Buffer], whole: Buffer, before: set[int]
    ) -> None:
        """Put a write into the input in the place of one call."""
        call, x = self.steps[position], versions[0]
        assert isinstance(call, Extern)
        if call.target not in _WINDOWS:
            base = View(x, x.shape, x.strides, index(0))
            self.steps[position] = replace(
                call,
                target=_CALLS[call.target],
                args=(base, *call.args[1:]),
                outputs=(),
                reason=_REASON,
                impure=True,
                moved=_elements(call, x),
            )
            return
        window, part = _window(call, x), call.args[1]
        assert isinstance(part, View)
        previous = {self.maker[whole]} if whole in self.maker else set()
        if self._store(position, versions, window, part, before | previous):
            self.steps[position] = None
            return
        self.steps[position] = replace(
            call,
            target=COPY,
            args=(window.view(x, part.shape), part),
            kwargs=(),
            outputs=(),
            reason=_REASON,
            impure=True,
            moved=product(part.shape),
        )

    def _store(
        self,
        position: int,
        versions: list[Buffer],
        window: _Window,
        part: View,
        before: set[int],
    ) -> bool:
        """Let the kernel that makes a part store it in the input; False if it cannot."""
        x, made = versions[0], part.buffer
        maker, axes = self.maker.get(made), _axes_of(part)
        kernel = None if maker is None else self.steps[maker]
        if maker is None or axes is None or not isinstance(kernel, Kernel):
            return False
        if made.dtype is not x.dtype or x in self.stored or set(versions) & set(step_reads(kernel)):
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
            case Extern():
                kwargs = tuple((name, self._argument(value)) for name, value in step.kwargs)
                return replace(step, args=tuple(map(self._argument, step.args)), kwargs=kwargs)
            case Chunked():
                sliced, whole = (tuple(map(self._view, v)) for v in (step.sliced, step.whole))
                return replace(step, sliced=sliced, whole=whole)
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

    def _argument(self, arg: Argument) -> Argument:
        match arg:
            case View():
                return self._view(arg)
            case tuple():
                return tuple(map(self._argument, arg))
            case _:
                return arg

    def _view(self, view: View) -> View:
        return replace(view, buffer=self.renamed.get(view.buffer, view.buffer))


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


def _elements(call: Extern, x: Buffer) -> Index:
    """Return how many elements of its first argument a call writes, and reads to add to them."""
    name = call.target.removeprefix("aten.").partition(".")[0].removeprefix("_unsafe_")
    if name != "index_put":
        named = call.args[3] if name in ("index_copy", "index_add") else call.args[2]
        count = product(named.shape) if isinstance(named, View) else product(x.shape)
        return count * 2 if name.endswith("_add") else count
    chosen = call.args[1] if isinstance(call.args[1], tuple) else ()
    picked = [view for view in chosen if isinstance(view, View)]
    if any(len(view.shape) == 0 or view.buffer.dtype.name == "bool" for view in picked):
        return product(x.shape)
    rank = max((len(view.shape) for view in picked), default=0)
    places = index(1)
    for k in range(1, rank + 1):
        extents = [view.shape[-k] for view in picked if len(view.shape) >= k]
        places = places * max(extents, key=lambda extent: extent.hint())
    rest = [e for k, e in enumerate(x.shape) if k >= len(chosen) or chosen[k] is None]
    accumulates = call.args[3] if len(call.args) > 3 else dict(call.kwargs).get("accumulate")
    return product((places, *rest)) * (2 if accumulates else 1)
