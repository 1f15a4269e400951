"""Undo functionalization: write mutated inputs, or parts of them, in place.

Spec: ``schedule -> schedule``. AOTAutograd ends a graph that mutates its inputs with
``copy_(x, new)``. If a kernel produces ``new``, it stores to ``x`` instead, and the copy is
removed: an optimizer then reads and writes each tensor once. ``x[:, p] = k`` becomes ``new =
slice_scatter(x, k)``, or ``index_put`` or ``scatter``: two copies of the whole. Then the call
writes into x, or the kernel that produces k if the part is a window. Of a chain of such calls, each
on the result of the one before, each becomes a write. Consumers of ``new`` read x. Legal if

1. x and all results have one shape and type, and if calls made them, one layout; none is returned;
2. consumers of x, or of an overwritten result, can run before the write: they get new edges, and
   steps are sorted again;
3. no other eager kernel takes x or a result: it may keep a view;
4. the written values are no part of x, and a kernel that stores them may do so (``destination``).

Otherwise the copy stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from fusec.errors import InternalError
from fusec.ir.argument import whole_view
from fusec.ir.disjoint import has_distinct_elements
from fusec.ir.expr import Buffer
from fusec.ir.extern import CopyInto, Scatter, WindowUpdate, WriteInto
from fusec.ir.graph import Extern, Kernel, RowLoop, Schedule, Step, View
from fusec.ir.index import index
from fusec.ir.rewrite import reading, rewrite
from fusec.passes.dag import below, dependencies, sorted_steps
from fusec.passes.memory.destination import Destination, in_reading_order, redirected

_REASON = "writes a part of an input in place"


def in_place(schedule: Schedule) -> Schedule:
    """Return the schedule with copies to inputs replaced by writes in place, where legal."""
    copies = list(_copies(schedule))
    return _InPlace(schedule).run(copies) if copies else schedule


def _copies(schedule: Schedule) -> Iterator[tuple[int, Buffer, Buffer]]:
    """Yield (position, target, source) of each copy of one whole tensor over an input."""
    inputs = set(schedule.graph.inputs)
    for position, step in enumerate(schedule.steps):
        match step:
            case Extern(effect=CopyInto(), args=(View() as target, View() as source, *_)):
                x, new = target.buffer, source.buffer
                same = (x.shape, x.dtype, x.form) == (new.shape, new.dtype, new.form)
                if same and target.is_whole and source.is_whole and x in inputs:
                    yield position, x, new


class _InPlace:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.steps: dict[int, Step] = dict(enumerate(schedule.steps))
        self.dag = dependencies(schedule.steps)
        self.calls = {k: step for k, step in self.steps.items() if isinstance(step, Extern)}
        self.kernels = {k: step for k, step in self.steps.items() if isinstance(step, Kernel)}
        self.maker = {buffer: k for k, step in self.steps.items() for buffer in step.writes}
        self.readers: dict[Buffer, set[int]] = defaultdict(set)
        for k, step in self.steps.items():
            for buffer in step.reads:
                self.readers[buffer].add(k)
        self.returned = schedule.graph.returned
        self.renamed: dict[Buffer, Buffer] = {}

    def run(self, copies: list[tuple[int, Buffer, Buffer]]) -> Schedule:
        safe = [copy for copy in copies if has_distinct_elements(copy[1])]
        whole = [copy for copy in safe if not self._write_parts(*copy)]
        for copy in whole:
            self._write_whole(*copy)
        if not self.renamed:
            return self.schedule
        steps = (self.steps[k] for k in sorted_steps(self.dag) if k in self.steps)
        return replace(self.schedule, steps=tuple(map(self._reading, steps)))

    def _write_whole(self, copy: int, x: Buffer, new: Buffer) -> None:
        """Redirect the kernel that produces the source of a copy to the input, if legal."""
        before, readers = (self.readers[buffer] - {copy} for buffer in (x, new))
        if new in self.returned or not readers <= self.kernels.keys():
            return
        if before.isdisjoint(self.calls) and self._store(new, Destination(x), before):
            self.renamed[new] = x
            self._drop(copy)

    def _write_parts(self, copy: int, x: Buffer, new: Buffer) -> bool:
        """Let the chain of updates that ends in a copy write the input; return False if illegal."""
        chain = self._chain(x, new)
        if not chain:
            return False
        memory = {new, *chain.values()}
        ahead = {k: self.readers[old] - {k, copy} for k, old in chain.items()}
        for k, before in ahead.items():
            parts = {view.buffer for view in self.calls[k].views[1:]}
            if parts & memory or before & self.calls.keys() or not self._can_follow(k, before):
                return False
        for k, before in ahead.items():
            self.dag.add_edges_from((reader, k) for reader in before)
        self.renamed.update(dict.fromkeys(memory - {x}, x))
        self._drop(copy)
        previous: set[int] = set()
        for k, before in ahead.items():
            self._write_part(k, x, before | previous)
            previous = {k}
        return True

    def _chain(self, x: Buffer, new: Buffer) -> dict[int, Buffer]:
        """Return update call -> its base, from ``x`` to ``new``; empty if other steps intervene."""
        chain: list[tuple[int, Buffer]] = []
        version = new
        while version is not x:
            position = self.maker.get(version, -1)
            same = version.strides == x.strides and version.dtype is x.dtype
            match self.calls.get(position):
                case Extern(effect=WindowUpdate() | Scatter(), args=(View() as base, *_)) if (
                    same and base.is_whole and version not in self.returned
                ):
                    version = base.buffer
                    chain.append((position, version))
                case _:
                    return {}
        return dict(reversed(chain))

    def _write_part(self, position: int, x: Buffer, before: set[int]) -> None:
        """Replace one update call by a write into the input: by a kernel's store, if legal."""
        call = self.calls[position]
        match call.effect, call.args:
            case WindowUpdate(window), (_, View() as part, *_):
                made, axes = part.buffer, _axes_of(part)
                kept = made in self.returned or self.readers[made] != {position}
                into = Destination(x, window, axes, kept)
                if axes is not None and self._store(made, into, before):
                    self._drop(position)
                    return
        self.steps[position] = _writing(call, x)

    def _store(self, made: Buffer, into: Destination, before: set[int]) -> bool:
        """Redirect a result's kernel to an input, after the steps ``before``; False if illegal."""
        position, x = self.maker.get(made, -1), into.whole
        kernel, before = self.kernels.get(position), before - {position}
        if kernel is None or x in self.maker or made.dtype is not x.dtype:
            return False
        stored = redirected(kernel, {made: into})
        reads = any(self.renamed.get(buffer) is x for buffer in kernel.reads)
        if stored is None or reads or not self._can_follow(position, before):
            return False
        self.dag.add_edges_from((other, position) for other in before)
        self.maker[x] = position
        self.steps[position] = self.kernels[position] = stored
        return True

    def _can_follow(self, position: int, before: set[int]) -> bool:
        """Return True if a step can run after ``before``: none of them depends on it."""
        return not before or before.isdisjoint(below(self.dag, {position}))

    def _drop(self, position: int) -> None:
        """Remove a step and its reads."""
        for buffer in self.steps.pop(position).reads:
            self.readers[buffer].discard(position)

    def _reading(self, step: Step) -> Step:
        """Return a step that loads the inputs instead of the buffers renamed to them."""
        match step:
            case Kernel():
                kernel = in_reading_order(step) or step
                return kernel.map(lambda exprs: rewrite(exprs, reading(self.renamed)))
            case Extern() | RowLoop():
                return step.reading(self.renamed)
            case _:
                return step


def _writing(call: Extern, x: Buffer) -> Extern:
    """Return the in-place variant of an update call, which writes to the input."""
    made = replace(call, outputs=(), reason=_REASON, impure=True)
    match call.effect, call.args:
        case Scatter(target, moved), (_, *others):
            args = (whole_view(x), *others)
            return replace(made, target=target, args=args, effect=WriteInto(moved))
        case WindowUpdate(window, copied), (_, View() as part, *_):
            args = (replace(window.view(x, part.shape), form=part.form), part)
            return replace(made, target=copied, args=args, kwargs=(), effect=CopyInto())
    raise InternalError(call, stage="in_place")


def _axes_of(view: View) -> tuple[int | None, ...] | None:
    """Return, for each axis of a view, the axis of its buffer, or None for extent 1.

    None if the view is not a permutation of all axes of the buffer.
    """
    shape, one = view.buffer.shape, index(1)
    place = {axis: k for k, axis in enumerate(zip(shape, view.buffer.strides, strict=True))}
    axes = tuple(
        None if extent is one else place.get((extent, stride), -1)
        for extent, stride in zip(view.shape, view.strides, strict=True)
    )
    long = [k for k, extent in enumerate(shape) if extent is not one]
    is_all = sorted(k for k in axes if k is not None) == long and view.offset is index(0)
    return axes if is_all else None
