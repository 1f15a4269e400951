"""Graphs and kernels: lists of definitions in index notation.

Grammar of the printed form::

    graph  ::= 'graph' name '(' buffer: dtype[shape], ... ')' line*  'return' buffer, ...
    line   ::= buffer '[' axis, ... ']' '=' expr            Def
             | buffer, ... '=' 'extern' target '(' ... ')'  a ``CallStep``, with the reason
    kernel ::= 'kernel' name '->' buffer, ...  'grid' axis:extent ... 'inside' axis:extent ...
               (buffer '[' index, ... ']' '=' expr)*

Worked example, LayerNorm's first half::

    xr[m, c] = x[m, c] + r[m, c]
    mu[m]    = sum(c: xr[m, c]) / 768
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NewType, TypeAlias

from fusec.errors import InternalError
from fusec.ir.argument import Argument as Argument
from fusec.ir.argument import Comparison as Comparison
from fusec.ir.argument import Condition as Condition
from fusec.ir.argument import InputObject as InputObject
from fusec.ir.argument import Junction as Junction
from fusec.ir.argument import NodeConstant as NodeConstant
from fusec.ir.argument import OwnTensor as OwnTensor
from fusec.ir.argument import SizeValue as SizeValue
from fusec.ir.argument import View as View
from fusec.ir.argument import argument_views as argument_views
from fusec.ir.argument import whole_view as whole_view
from fusec.ir.decision import Decision
from fusec.ir.definition import NOWHERE, by_name, loaded, sizes_in_axes, sizes_in_exprs
from fusec.ir.definition import Def as Def
from fusec.ir.definition import Origin as Origin
from fusec.ir.definition import sizes_in as sizes_in
from fusec.ir.expr import (
    Buffer,
    Expr,
    IndexValue,
    Load,
    Reduce,
    Scan,
    postorder,
    replace_bound,
    substitute,
    substitute_all,
)
from fusec.ir.extern import BoundSize as BoundSize
from fusec.ir.extern import CallStep as CallStep
from fusec.ir.extern import Constant as Constant
from fusec.ir.extern import Extern as Extern
from fusec.ir.extern import SizeMinimum as SizeMinimum
from fusec.ir.index import Axis, Index, Size, index

Line: TypeAlias = "Def | CallStep | RowLoop"
"""An element of a graph, in execution order."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Definitions and externs in execution order.

    Attributes:
        inputs: tensors, symbolic sizes, objects that externs take, or None for unused arguments,
            in call order.
        outputs: what the call returns: views of buffers, sizes, constants, objects or None.
        decisions: decisions of passes about it so far.
        tangents: the inputs of a backward that are gradients. No guard covers what it is given.
    """

    name: str
    inputs: tuple[Buffer | Size | InputObject | None, ...]
    nodes: tuple[Line, ...]
    outputs: tuple[Argument, ...]
    decisions: tuple[Decision, ...] = ()
    tangents: tuple[Buffer, ...] = ()

    def __str__(self) -> str:
        from fusec.ir.text import print_graph  # local: text imports the structures

        return print_graph(self)

    @property
    def defs(self) -> tuple[Def, ...]:
        """The lines in index notation."""
        return tuple(line for line in self.nodes if isinstance(line, Def))

    @property
    def externs(self) -> tuple[Extern, ...]:
        """The calls of eager kernels."""
        return tuple(line for line in self.nodes if isinstance(line, Extern))

    @property
    def called(self) -> Mapping[str, str]:
        """FX node -> the printed name of the eager kernel, or constant, that it stands for."""
        return {
            line.node: line.target for line in self.nodes if isinstance(line, Extern | Constant)
        }

    @property
    def returned(self) -> frozenset[Buffer]:
        """The buffers of which it returns views."""
        return frozenset(view.buffer for view in argument_views(self.outputs))

    def map_defs(self, rule: Callable[[Def], Iterable[Line]]) -> Graph:
        """Return the graph with each definition replaced by the lines that ``rule`` returns."""
        nodes: list[Line] = []
        for line in self.nodes:
            nodes.extend(rule(line) if isinstance(line, Def) else (line,))
        same = len(nodes) == len(self.nodes) and all(map(operator.is_, nodes, self.nodes))
        return self if same else replace(self, nodes=tuple(nodes))

    def map(self, rule: Callable[[tuple[Expr, ...]], tuple[Expr, ...]]) -> Graph:
        """Return the graph with the expression of each definition rewritten."""
        return self.map_defs(lambda line: (line.map(rule),))

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes: inputs, extents of inputs, and sizes that externs define."""
        bound = (size for node in self.nodes for size in node.defines_sizes)
        return tuple(dict.fromkeys((*self.given_sizes, *bound)))

    @property
    def given_sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes known from inputs: size inputs, and extents of tensors."""
        given = (item for item in self.inputs if isinstance(item, Size))
        return (*given, *(size for size, _, _ in self.measured))

    @property
    def measured(self) -> tuple[tuple[Size, Buffer, int], ...]:
        """The sizes read from input tensors, each with the first tensor and axis that has it."""
        found: dict[Size, tuple[Size, Buffer, int]] = {}
        for item in (item for item in self.inputs if isinstance(item, Buffer)):
            for axis, extent in enumerate(item.shape):
                size = extent.as_size()
                if size is not None and size not in self.inputs:
                    found.setdefault(size, (size, item, axis))
        return tuple(found.values())


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """``buffer[indices] = expr`` at every point of the kernel's axes that either side mentions.

    Attributes:
        adds: it is a sum, whose parts are added to memory that begins as zeros, in any order: an
            axis that it sums along may be on the grid.
        guard: where it is false, nothing is written; None: it is true.
    """

    buffer: Buffer
    indices: tuple[Index, ...]
    expr: Expr
    adds: bool = False
    guard: Expr | None = None


def axes_of(stores: Iterable[Store]) -> set[Axis]:
    """Return every axis in the indices and expressions of stores."""
    stores = tuple(stores)
    found = {axis for store in stores for value in store.indices for axis in value.axes}
    for node in postorder(store.expr for store in stores):
        match node:
            case Reduce() | Scan():
                found.update(node.over)
            case Load() | IndexValue():
                found.update(node.axes)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Several definitions over unified axes, with loads of internal buffers inlined.

    Attributes:
        grid: parallel axes: every store and reduction keeps its coordinate along them.
        inside: axes that are reduced, or that only some stores have.
        defs: the buffers of all definitions inside, including buffers that are never stored.
        labels: names of values, from the definitions that they come from.
        configuration: the index of the target's plan that it runs by: 0 is the one chosen by
            rule, others won a race.
    """

    name: str
    grid: tuple[Axis, ...]
    inside: tuple[Axis, ...]
    stores: tuple[Store, ...]
    origin: Origin = NOWHERE
    defs: tuple[Buffer, ...] = ()
    labels: tuple[tuple[Expr, str], ...] = ()
    configuration: int = 0

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.grid + self.inside

    def map(self, rule: Callable[[tuple[Expr, ...]], tuple[Expr, ...]]) -> Kernel:
        """Return the kernel with all its expressions, labels' included, rewritten in one call.

        Labels stay attached to their values, because equal expressions stay equal.
        """
        labels = tuple(value for value, _ in self.labels)
        guards = tuple(store.guard for store in self.stores if store.guard is not None)
        found = iter(rule((*(store.expr for store in self.stores), *guards, *labels)))
        stores = [replace(store, expr=next(found)) for store in self.stores]
        stores = [s if s.guard is None else replace(s, guard=next(found)) for s in stores]
        return replace(
            self, stores=tuple(stores), labels=tuple((next(found), n) for _, n in self.labels)
        )

    def substitute(self, mapping: Mapping[Axis, Index]) -> Kernel:
        """Return the kernel with axes renamed, split or merged: in values, indices and loops."""
        mapped = self.map(lambda exprs: substitute_all(exprs, mapping))
        return replace(
            mapped,
            grid=replace_bound(self.grid, mapping),
            inside=replace_bound(self.inside, mapping),
            stores=tuple(
                replace(s, indices=tuple(substitute(i, mapping) for i in s.indices))
                for s in mapped.stores
            ),
        )

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of one launch: itself. A foreach kernel has several."""
        return (self,)

    impure: ClassVar[bool] = False
    is_launch: ClassVar[bool] = True
    defines_sizes: ClassVar[tuple[Size, ...]] = ()

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The distinct buffers that it loads, in order."""
        return loaded(tuple(store.expr for store in self.stores))

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The distinct buffers that it stores to, in order, including inputs written in place."""
        return tuple(dict.fromkeys(store.buffer.base for store in self.stores))

    @property
    def loads(self) -> tuple[Load, ...]:
        """The distinct loads among its nodes."""
        return tuple(node for node in kernel_nodes(self) if isinstance(node, Load))

    @property
    def reductions(self) -> tuple[Reduce, ...]:
        """The distinct reductions among its nodes, inner ones first."""
        return tuple(node for node in kernel_nodes(self) if isinstance(node, Reduce))

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes that it needs, by name; of a flat kernel, its program's arguments."""
        indices = [i for s in self.stores for i in (*s.indices, *s.buffer.strides)]
        found = sizes_in_exprs(store.expr for store in self.stores)
        return by_name(found | sizes_in_axes(self.axes) | sizes_in(indices))


FlatKernel = NewType("FlatKernel", Kernel)
"""A kernel whose loads and stores have one index: an element offset into ``Buffer.flat()``.

``passes.kernel.coalesce`` makes it; scheduling and lowering take it.
"""


@functools.lru_cache(maxsize=8)
def kernel_nodes(kernel: Kernel) -> tuple[Expr, ...]:
    """Return the distinct nodes of a kernel's stores, children first; memoised."""
    return tuple(postorder(s.expr for s in kernel.stores))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A graph cut into kernels: kernels, externs and row loops in execution order.

    Attributes:
        decisions: decisions of passes, those about the graph first.
    """

    graph: Graph
    steps: tuple[Step, ...]
    decisions: tuple[Decision, ...] = ()

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that are steps, without those of foreach kernels and row loops."""
        return tuple(step for step in self.steps if isinstance(step, Kernel))

    @property
    def externs(self) -> tuple[Extern, ...]:
        """The calls of eager kernels, without those inside row loops."""
        return tuple(step for step in self.steps if isinstance(step, Extern))

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The tensors that the model holds."""
        return tuple(step for step in self.steps if isinstance(step, Constant))

    @property
    def loops(self) -> tuple[RowLoop, ...]:
        """The row loops."""
        return tuple(step for step in self.steps if isinstance(step, RowLoop))

    def map_kernels(self, rule: Callable[[Kernel], Iterable[Step]]) -> Schedule:
        """Return the schedule with each kernel replaced by the steps that ``rule`` returns."""
        steps: list[Step] = []
        for step in self.steps:
            steps.extend(rule(step) if isinstance(step, Kernel) else (step,))
        same = len(steps) == len(self.steps) and all(map(operator.is_, steps, self.steps))
        return self if same else replace(self, steps=tuple(steps))


@dataclass(frozen=True, slots=True)
class Carried:
    """A value that each iteration of a loop reads, and replaces for the next one.

    Iterations write ``final`` and ``other`` in turn, so that the last one writes ``final``; the
    first reads ``initial``, each later one what the iteration before it wrote. Where it is not
    known which one is the last, what it wrote is copied to ``final``.

    Attributes:
        initial: a window with the layout of the others.
    """

    initial: View
    final: Buffer
    other: Buffer


@dataclass(frozen=True, slots=True, eq=False)
class RowLoop:
    """A loop over the rows of some tensors, a chunk of rows at a time, in order.

    The body's inputs are, in this order: sizes (``count``, if it is one, and any of the enclosing
    graph's); a buffer for each of ``sliced`` and of ``whole``, and for each value of ``carried``;
    ``added``; a buffer for each of ``placed``; for each of ``carried`` its next value, if kernels
    store it. It returns the rows of ``results``, then the next values of ``carried`` while it is a
    graph, of which no kernel stores anything yet.

    Worked example, ``h = tanh(x[t] + h)`` for each t, and all values of h::

        rows scan -> ys, last, last_other    1 of 512 at a time, carries last
          x[0, i], h[i] -> y[0, i] = tanh(x[0, i] + h[i]),  next[i] = tanh(x[0, i] + h[i])

    Attributes:
        rows: the number of all rows.
        chunk: the rows of one iteration.
        count: the chunk's rows in the body; a size of its own if the last chunk may be short.
        body: the graph of one chunk, or its schedule.
        sliced: windows whose first axis is the rows; the body takes a chunk of each.
        results: buffers of which the body computes some rows; row-major.
        placed: the same, but the body's kernels store the rows there.
        added: buffers that start at 0, to which the body itself adds.
        carried: values that each iteration replaces.
        while_true: an iteration follows as long as the first carried value, a truth value, is true,
            instead of one for each chunk; there are no rows then.
    """

    name: str
    rows: Index
    chunk: int
    count: Index
    body: Graph | Schedule
    sliced: tuple[View, ...]
    whole: tuple[View, ...]
    results: tuple[Buffer, ...]
    added: tuple[Buffer, ...]
    placed: tuple[Buffer, ...] = ()
    carried: tuple[Carried, ...] = ()
    while_true: bool = False

    impure: ClassVar[bool] = False
    is_launch: ClassVar[bool] = True
    defines_sizes: ClassVar[tuple[Size, ...]] = ()

    @property
    def graph(self) -> Graph:
        """The graph of one chunk."""
        return self.body if isinstance(self.body, Graph) else self.body.graph

    @property
    def schedule(self) -> Schedule:
        """The schedule of one chunk.

        Raises:
            InternalError: if the body was not fused.
        """
        if isinstance(self.body, Graph):
            raise InternalError(f"the body of {self.name} is not fused", stage="ir.graph")
        return self.body

    @property
    def views(self) -> tuple[View, ...]:
        """The views that the loop reads."""
        return (*self.sliced, *self.whole, *(one.initial for one in self.carried))

    @property
    def chunks(self) -> dict[Buffer, Buffer]:
        """The buffers that it computes by rows -> the body's buffers for a chunk of their rows."""
        made = [view.buffer for view in argument_views(self.graph.outputs)][: len(self.results)]
        made += self._inner(len(self.views) + len(self.added), len(self.placed))
        return dict(zip((*self.results, *self.placed), made, strict=True))

    @property
    def moving(self) -> tuple[Buffer, ...]:
        """The body's buffers of which each iteration has other rows."""
        return (*self._inner(0, len(self.sliced)), *self.chunks.values())

    @property
    def outside(self) -> dict[Buffer, View]:
        """Input or result of the body -> the view outside that it is, or is a chunk of."""
        inner = self._inner(0, len(self.views) + len(self.added))
        found = dict(zip(inner, (*self.views, *map(whole_view, self.added)), strict=True))
        for buffer, part in self.chunks.items():
            shape = (self.rows, *part.shape[1:])
            found[part] = View(buffer, shape, part.strides, index(0))
        states = zip(self.states, self.carried, strict=True)
        return found | {made: whole_view(one.final) for (_, made), one in states}

    @property
    def states(self) -> tuple[tuple[Buffer, Buffer], ...]:
        """The body's buffers of each carried value: the one that it reads, and the next one."""
        count = len(self.carried)
        read = self._inner(len(self.views) - count, count)
        if isinstance(self.body, Graph):
            views = argument_views(self.graph.outputs)
            made = tuple(view.buffer for view in views[len(views) - count :])
        else:
            made = self._inner(len(self.views) + len(self.added) + len(self.placed), count)
        return tuple(zip(read, made, strict=True))

    def _inner(self, first: int, count: int) -> tuple[Buffer, ...]:
        """Return some of the buffers that the body takes."""
        inner = [item for item in self.graph.inputs if isinstance(item, Buffer)]
        return tuple(inner[first : first + count])

    def reading(self, instead: Mapping[Buffer, Buffer]) -> RowLoop:
        """Return the loop with the buffers that it reads replaced as ``instead`` maps them."""
        if not any(view.buffer in instead for view in self.views):
            return self

        def renamed(view: View) -> View:
            return replace(view, buffer=instead.get(view.buffer, view.buffer))

        return replace(
            self,
            sliced=tuple(map(renamed, self.sliced)),
            whole=tuple(map(renamed, self.whole)),
            carried=tuple(replace(c, initial=renamed(c.initial)) for c in self.carried),
        )

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The distinct buffers that the loop reads, in order."""
        return tuple(dict.fromkeys(view.buffer.base for view in self.views))

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The buffers that the loop defines."""
        carried = (buffer for one in self.carried for buffer in (one.final, one.other))
        return (*self.results, *self.placed, *self.added, *carried)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes that it needs, by name."""
        indices = [i for view in self.views for i in (*view.shape, *view.strides, view.offset)]
        layouts = [i for buffer in self.writes for i in (*buffer.shape, *buffer.strides)]
        given = {i for i in self.graph.inputs if isinstance(i, Size)} - sizes_in((self.count,))
        return by_name(given | sizes_in((self.rows, *indices, *layouts)))

    @property
    def rounds(self) -> int:
        """The number of chunks, at the hints of sizes."""
        return -(-self.rows.hint() // self.chunk)


@dataclass(frozen=True, slots=True, eq=False)
class ForeachKernel:
    """Independent kernels of one canonical form, run by one launch.

    Attributes:
        kernels: the members.
        template: their common form, over buffers and axes of its own, whose extents are
            ``extents``.
        buffers: the template's buffers.
        rows: for each member, its buffers in place of ``buffers`` and the values of ``extents``.
    """

    name: str
    kernels: tuple[Kernel, ...]
    template: FlatKernel
    buffers: tuple[Buffer, ...]
    extents: tuple[Size, ...]
    rows: tuple[tuple[tuple[Buffer, ...], tuple[int, ...]], ...]

    impure: ClassVar[bool] = False
    is_launch: ClassVar[bool] = True
    defines_sizes: ClassVar[tuple[Size, ...]] = ()

    @property
    def reads(self) -> tuple[Buffer, ...]:
        """The distinct buffers that the members load, in order."""
        return tuple(dict.fromkeys(b for kernel in self.kernels for b in kernel.reads))

    @property
    def writes(self) -> tuple[Buffer, ...]:
        """The distinct buffers that the members store to, in order."""
        return tuple(dict.fromkeys(b for kernel in self.kernels for b in kernel.writes))

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes that the members need, by name."""
        return by_name({size for kernel in self.kernels for size in kernel.sizes})

    @property
    def origin(self) -> Origin:
        """The joined origins of the members."""
        return sum((kernel.origin for kernel in self.kernels), NOWHERE)


Step: TypeAlias = "Kernel | ForeachKernel | RowLoop | CallStep"
"""An element of a schedule, in execution order."""


def all_kernels(schedule: Schedule) -> tuple[Kernel, ...]:
    """Return all kernels of a schedule, including those of foreach kernels and row loops."""
    return tuple(kernel for launch in all_launches(schedule) for kernel in launch.kernels)


def all_launches(schedule: Schedule) -> tuple[Kernel | ForeachKernel, ...]:
    """Return all kernels and foreach kernels of a schedule, including those inside row loops."""
    return tuple(s for s in _all_steps(schedule) if isinstance(s, Kernel | ForeachKernel))


def launched_externs(schedule: Schedule) -> tuple[Extern, ...]:
    """Return the calls of eager kernels of a schedule, including those inside row loops."""
    return tuple(s for s in _all_steps(schedule) if isinstance(s, Extern) and s.is_launch)


def _all_steps(schedule: Schedule) -> Iterator[Step]:
    """Yield the steps of a schedule, and those of the bodies in the place of row loops."""
    for step in schedule.steps:
        if isinstance(step, RowLoop):
            yield from _all_steps(step.schedule)
        else:
            yield step
