"""Graphs and kernels: lists of definitions in index notation.

Grammar of the printed form::

    graph  ::= 'graph' name '(' buffer: dtype[shape], ... ')' line*  'return' buffer, ...
    line   ::= buffer '[' axis, ... ']' '=' expr            Def
             | buffer, ... '=' 'extern' target '(' ... ')'  Extern, with the reason
    kernel ::= 'kernel' name '->' buffer, ...  'grid' axis:extent ... 'inside' axis:extent ...
               (buffer '[' index, ... ']' '=' expr)*

Worked example, LayerNorm's first half::

    xr[m, c] = x[m, c] + r[m, c]
    mu[m]    = sum(c: xr[m, c]) / 768
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NewType, TypeAlias

from fusec.ir.atoms import Minimum
from fusec.ir.decision import Decision
from fusec.ir.expr import (
    Buffer,
    Expr,
    IndexValue,
    Load,
    postorder,
    replace_bound,
    substitute,
    substitute_all,
)
from fusec.ir.index import Axis, Index, Runtime, Size


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a definition comes from in the user's program.

    Attributes:
        ops: the ATen operations, in order, such as ``("add.Tensor", "mul.Tensor")``.
        source: the user's lines, such as ``("model.py:41 in forward: x = x + r",)``.
    """

    ops: tuple[str, ...] = ()
    source: tuple[str, ...] = ()

    def __add__(self, other: Origin) -> Origin:
        return Origin(
            tuple(dict.fromkeys(self.ops + other.ops)),
            tuple(dict.fromkeys(self.source + other.source)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Def:
    """``buffer[axes] = expr``: one line of index notation.

    Attributes:
        covers: buffers whose definitions were substituted into ``expr``, to be computed here.
    """

    buffer: Buffer
    axes: tuple[Axis, ...]
    expr: Expr
    origin: Origin = Origin()
    covers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """A strided window into a buffer, as eager kernels take it; sizes and strides in elements."""

    buffer: Buffer
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    offset: Index


@dataclass(frozen=True, slots=True)
class SizeValue:
    """A symbolic integer among an extern's arguments."""

    index: Index


@dataclass(frozen=True, slots=True)
class Comparison:
    """A condition on sizes among an extern's arguments; ``sign`` is Python's."""

    sign: str
    left: Index
    right: Index


@dataclass(frozen=True, slots=True)
class Junction:
    """Conditions of which all hold, or at least one does; ``sign`` is ``and`` or ``or``."""

    sign: str
    parts: tuple[Condition, ...]


Condition: TypeAlias = "Comparison | Junction | bool"


@dataclass(frozen=True, slots=True)
class NodeConstant:
    """An argument that only the FX graph can give: position ``path`` among the node's arguments."""

    node: str
    path: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class InputObject:
    """An input that is neither tensor nor size, a process group say: passed on as it is."""

    name: str


Argument: TypeAlias = (
    "View | SizeValue | Condition | NodeConstant | InputObject | int | float | bool | str "
    "| tuple[Argument, ...] | None"
)


@dataclass(frozen=True, slots=True)
class BoundSize:
    """A size that depends on data, where a call gives it.

    Attributes:
        result: which of the call's results.
        axis: of that, which extent; None if the result is the number itself.
    """

    size: Size
    result: int
    axis: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Extern:
    """A call of the eager kernel of one FX node, with the reason why it is not lowered.

    Attributes:
        meaning: definitions that compute the same outputs, where index notation can say them: what
            stands in the call's place where a kernel of fusec's own is the better choice.
        node: name of the FX node, which holds the callable.
        target: its printed name, such as ``aten.mm.default``.
        outputs: buffers it makes, None for results that are not tensors.
        impure: it writes its arguments or talks to other ranks; kept, in order.
        many: the call returns a sequence.
        moved: of a call that changes a part of its first argument, how many elements of that it
            reads and writes.
        sizes: those that are known once it has run.
        region: of a call that is no operation but a loop over rows: what it runs.
    """

    node: str
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[Buffer | None, ...]
    reason: str
    origin: Origin = Origin()
    impure: bool = False
    many: bool = False
    meaning: tuple[Def, ...] = ()
    moved: Index | None = None
    sizes: tuple[BoundSize, ...] = ()
    region: Region | None = None

    @property
    def is_launch(self) -> bool:
        """Whether a kernel may run: not for a constant, a condition or arithmetic on sizes."""
        touched = extern_views(self) or any(b is not None for b in self.outputs)
        return bool(touched) and self.target != "get_attr"


@dataclass(frozen=True, slots=True)
class Region:
    """What a loop over rows runs (``passes/chunk.py``), as a graph of some rows.

    Attributes:
        rows: of the whole; ``chunk`` of them at a time, ``count`` in the body's words.
        body: the graph of one chunk. Its inputs: the rows it has, where the last chunk is short;
            a buffer for each sliced and whole argument; the sums it adds to. It returns the rows'
            results, and the sums over its rows.
        results, sums, added: buffers of the graph around: made row by row; what the body's sums
            are added to; and what the body itself adds to.
    """

    name: str
    rows: Index
    chunk: int
    count: Index
    body: Graph
    results: tuple[Buffer, ...]
    sums: tuple[Buffer, ...]
    added: tuple[Buffer, ...]


MINIMUM = "min"
"""What the extern that computes a ``Minimum`` calls: Python's own."""


def minimum_call(size: Minimum) -> Extern:
    """Return the extern that computes a size from others."""
    args = tuple(SizeValue(a) for a in size.args)
    bound = (BoundSize(size, 0, None),)
    return Extern(size.name, MINIMUM, args, (), (None,), "arithmetic on sizes", sizes=bound)


def sizes_in(values: Iterable[Index]) -> set[Size]:
    """Return the symbolic sizes that indices mention, those of the extents of their axes, too."""
    found: set[Size] = set()
    for atom in (atom for value in values for atom in value.atoms()):
        if isinstance(atom, Size):
            found.add(atom)
        elif isinstance(atom, Axis | Runtime):
            found |= sizes_in((atom.extent,))
    return found


@dataclass(frozen=True, slots=True)
class Graph:
    """Definitions and externs in execution order.

    Attributes:
        inputs: tensors, symbolic sizes, objects that externs take, or None for arguments nobody
            reads, in call order.
        outputs: what the call returns: views of buffers, sizes, constants, objects or None.
        decisions: what was decided about it so far.
    """

    name: str
    inputs: tuple[Buffer | Size | InputObject | None, ...]
    nodes: tuple[Def | Extern, ...]
    outputs: tuple[Argument, ...]
    decisions: tuple[Decision, ...] = ()

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The symbolic sizes: inputs, extents of inputs, and those that externs give."""
        given = [item for item in self.inputs if isinstance(item, Size)]
        calls = (node for node in self.nodes if isinstance(node, Extern))
        bound = (bound.size for call in calls for bound in call.sizes)
        return (*given, *(size for size, _, _ in self.measured), *bound)

    @property
    def measured(self) -> tuple[tuple[Size, Buffer, int], ...]:
        """The sizes that are no inputs but extents of some, each with its first place: an axis."""
        found: dict[Size, tuple[Size, Buffer, int]] = {}
        for item in (item for item in self.inputs if isinstance(item, Buffer)):
            for axis, extent in enumerate(item.shape):
                size = extent.as_size()
                if size is not None and size not in self.inputs:
                    found.setdefault(size, (size, item, axis))
        return tuple(found.values())


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """``buffer[indices] = expr`` at every point of the kernel's axes that either side has."""

    buffer: Buffer
    indices: tuple[Index, ...]
    expr: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Several definitions over unified axes, internal loads substituted away.

    Attributes:
        grid: axes along which every store and reduction keeps its coordinate: parallel.
        inside: axes that are reduced, or that only some stores have.
        defs: the buffers of all definitions inside, also those that are never stored.
        labels: names for values, from the definitions they were.
        configuration: which of its target's plans it runs by: 0 is the one chosen by rule, others
            won a race.
    """

    name: str
    grid: tuple[Axis, ...]
    inside: tuple[Axis, ...]
    stores: tuple[Store, ...]
    origin: Origin = Origin()
    defs: tuple[Buffer, ...] = ()
    labels: tuple[tuple[Expr, str], ...] = ()
    configuration: int = 0

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.grid + self.inside

    def map(self, rule: Callable[[tuple[Expr, ...]], tuple[Expr, ...]]) -> Kernel:
        """Return the kernel with all its expressions, labels' included, rewritten in one go.

        So labels still name what they named: what is equal before is equal after.
        """
        labels = tuple(value for value, _ in self.labels)
        found = iter(rule((*(store.expr for store in self.stores), *labels)))
        stores = tuple(replace(store, expr=next(found)) for store in self.stores)
        return replace(self, stores=stores, labels=tuple((next(found), n) for _, n in self.labels))

    def substitute(self, mapping: Mapping[Axis, Index]) -> Kernel:
        """Return the kernel with axes renamed, split or merged: in values, places and loops."""
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


FlatKernel = NewType("FlatKernel", Kernel)
"""A kernel whose loads and stores have one index: an element offset into ``Buffer.flat()``.

``passes.coalesce`` makes it, and what plans and lowers kernels asks for it.
"""


@functools.lru_cache(maxsize=8)
def kernel_nodes(kernel: Kernel) -> tuple[Expr, ...]:
    """Return the distinct nodes of what a kernel stores, children first; it is asked often."""
    return tuple(postorder(s.expr for s in kernel.stores))


def kernel_sizes(kernel: FlatKernel) -> tuple[Size, ...]:
    """Return the symbolic sizes that a kernel mentions, by name."""
    places = [store.indices[0] for store in kernel.stores]
    for node in kernel_nodes(kernel):
        if isinstance(node, Load):
            places.append(node.indices[0])
        elif isinstance(node, IndexValue):
            places.append(node.index)
    extents = (e for a in kernel.axes for e in (a.extent, a.limit) if e is not None)
    return tuple(sorted(sizes_in((*places, *extents)), key=lambda size: size.name))


def argument_views(args: tuple[Argument, ...]) -> list[View]:
    """Return every tensor view among (nested) arguments."""
    found: list[View] = []
    for arg in args:
        if isinstance(arg, View):
            found.append(arg)
        elif isinstance(arg, tuple):
            found.extend(argument_views(arg))
    return found


def extern_views(extern: Extern) -> list[View]:
    """Return every tensor an extern reads."""
    return argument_views(extern.args) + argument_views(tuple(v for _, v in extern.kwargs))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A graph cut into kernels: kernels, externs and loops over rows in execution order.

    Attributes:
        decisions: what led to it, those about the graph first.
    """

    graph: Graph
    steps: tuple[Step, ...]
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Chunked:
    """A loop over the rows of some tensors, so many at a time.

    The body's inputs are, in this order: sizes (``count``, if it is one, and any of those of the
    graph around); a buffer for each of ``sliced`` and of ``whole``; ``added``. It returns the rows
    of ``results``, then what is added to ``sums``.

    Attributes:
        rows: of the whole.
        chunk: rows at a time.
        count: the same as the body knows it; a size of its own if the last chunk may be short.
        sliced: windows whose first axis is the rows.
        results: buffers of which the body makes some rows; row-major.
        sums: buffers that begin as 0.
        added: buffers that begin as 0 and to which the body itself adds.
    """

    name: str
    rows: Index
    chunk: int
    count: Index
    body: Schedule
    sliced: tuple[View, ...]
    whole: tuple[View, ...]
    results: tuple[Buffer, ...]
    sums: tuple[Buffer, ...]
    added: tuple[Buffer, ...]

    @property
    def made(self) -> tuple[Buffer, ...]:
        """The buffers that are new after the loop."""
        return (*self.results, *self.sums, *self.added)

    @property
    def views(self) -> tuple[View, ...]:
        """What the loop reads."""
        return (*self.sliced, *self.whole)

    @property
    def rounds(self) -> int:
        """How many chunks there are, at the hints of sizes."""
        return -(-self.rows.hint() // self.chunk)


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Kernels that are alike and independent of each other, run by one launch.

    Attributes:
        kernels: the members.
        template: what they have in common, over buffers and axes of its own, whose extents are
            ``sizes``.
        buffers: the template's.
        rows: of each member, the buffers that stand for ``buffers`` and the values of ``sizes``.
    """

    name: str
    kernels: tuple[Kernel, ...]
    template: FlatKernel
    buffers: tuple[Buffer, ...]
    sizes: tuple[Size, ...]
    rows: tuple[tuple[tuple[Buffer, ...], tuple[int, ...]], ...]

    @property
    def stores(self) -> tuple[Store, ...]:
        """What the members store."""
        return tuple(store for kernel in self.kernels for store in kernel.stores)

    @property
    def origin(self) -> Origin:
        """Where the members come from."""
        ops = (op for kernel in self.kernels for op in kernel.origin.ops)
        source = (line for kernel in self.kernels for line in kernel.origin.source)
        return Origin(tuple(dict.fromkeys(ops)), tuple(dict.fromkeys(source)))


Step: TypeAlias = Kernel | Extern | Chunked | Bundle
"""What a schedule runs: one after the other."""


def all_kernels(schedule: Schedule) -> tuple[Kernel, ...]:
    """Return the kernels of a schedule, those in bundles and in loops over rows included."""
    found: list[Kernel] = []
    for launch in all_launches(schedule):
        found.extend(launch.kernels if isinstance(launch, Bundle) else (launch,))
    return tuple(found)


def all_launches(schedule: Schedule) -> tuple[Kernel | Bundle, ...]:
    """Return what a schedule launches of its own, what is inside loops over rows included."""
    found: list[Kernel | Bundle] = []
    for step in schedule.steps:
        if isinstance(step, Chunked):
            found.extend(all_launches(step.body))
        elif isinstance(step, Kernel | Bundle):
            found.append(step)
    return tuple(found)
