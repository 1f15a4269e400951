"""Build loop nests over the lanes of tiles: statements that share an axis share a loop over it.

The outer loop is over elements or over vectors of an axis that all statements of the nest have and
that none reduces; inner loops run over the other axis of their tiles. A value is defined in the
outermost loop in which its lanes are bound. A reduction along the inner axis accumulates in a carry
of the outer loop, and the first statement that reads it ends the inner loop: a softmax has one
outer loop and two or three inner ones. If the outer loop is over vectors, an inner reduction is a
dependence chain over the iterations: so several of them run side by side (unroll and jam).

Where neighbours along the vectors share what is loaded, as two weights share a byte, an iteration
has 2W elements in two copies, a vector of the even ones and one of the odd ones. Each copy knows
which of both it is, so that a choice between the weights takes no instruction.

Worked example, vectors along m: ``t<m> = max(n: s); u<m> = t * 2; e<m, n> = exp(s - u)``::

    for mv in 0 .. 2:
      carry t<l> = -inf
      for nr in 0 .. 32:
        t := maximum(t, s[32*nr + 16*mv + l])
      u<l> = t * 2
      for nr in 0 .. 32:
        e[32*nr + 16*mv + l] = exp(s[32*nr + 16*mv + l] - u)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fusec.codegen.cpp.tile_bounds import TileBounds
from fusec.codegen.cpp.tile_storage import Storage, below
from fusec.codegen.lowering.layout import ends_of
from fusec.errors import InternalError
from fusec.ir.combine import combine, folded, identities
from fusec.ir.dtype import F16, F32, DType
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    Reduce,
    Select,
    Var,
    reach,
    rebuild,
    substitute,
)
from fusec.ir.index import Axis, Index, floordiv, index, mod
from fusec.ir.names import Names
from fusec.ir.program import Carry, For, Let, Matrix, Put, Statement, Update, reads

_BEGINNING = index(0)

Item: TypeAlias = Let | Update | Put | Carry
"""The statements that run along lanes."""


@dataclass(frozen=True, slots=True)
class TileArray:
    """A tile in memory, row-major, or in panels of W columns, each row-major.

    Attributes:
        row: None for a tile with one lane axis.
        start: offset of its first element in a larger array, for a row-major tile.
        pairs: rows 2i and 2i + 1 are interleaved, element by element, as a product packs terms.
    """

    buffer: Buffer
    row: Axis | None
    column: Axis
    panels: bool = False
    start: Index = _BEGINNING
    pairs: bool = False

    def offset(self, at: Mapping[Axis, Index], width: int) -> Index:
        """Return the offset of the element at some coordinates."""
        column = at[self.column]
        if self.row is None:
            return column
        row = at[self.row]
        if self.pairs:
            pair = floordiv(row, index(2)) * self.column.extent + column
            return pair * 2 + mod(row, index(2))
        if not self.panels:
            return self.start + row * self.column.extent + column
        panel = floordiv(column, index(width)) * self.row.extent
        return (panel + row) * width + mod(column, index(width))

    def matrix(self, rows: Axis, width: int) -> Matrix:
        """Return the array as a matrix whose rows run along an axis."""
        assert self.row is not None
        if self.panels:
            return Matrix(self.buffer, index(0), index(width), index(1), self.row.extent * width)
        row, column = self.column.extent, index(1)
        if self.pairs:
            assert rows is self.row
            return Matrix(self.buffer, index(0), row, index(2), index(2 * width), pairs=True)
        if rows is not self.row:
            row, column = column, row
        return Matrix(self.buffer, self.start, row, column, column * width)


@dataclass(slots=True, eq=False)
class LaneScope:
    """Statements at some coordinates of lane axes, and the names of values at these coordinates."""

    at: dict[Axis, Index]
    body: list[Statement] = field(default_factory=list)
    memo: dict[Expr, Var | Const] = field(default_factory=dict)


class Writer:
    """Defines values in open scopes, over vectors of one lane axis.

    Attributes:
        arrays: value -> the array that vectors load it from.
        bounds: the elements that exist of each lane axis, where the next loop is.
        stops: axis of a loop over lanes -> its stops.
        forms: function's result -> the function's cheaper form.
        formed: the names given to such results, and the forms.
    """

    def __init__(
        self,
        storage: Storage,
        names: Names,
        width: int,
        bounds: TileBounds,
        forms: Mapping[Var, str] | None = None,
    ) -> None:
        self.storage, self.names, self.width, self.bounds = storage, names, width, bounds
        self.stops: dict[Axis, tuple[Index, ...]] = {}
        self.forms, self.formed = forms or {}, list[tuple[Var, str]]()
        self.lane = Axis("l", index(width))
        self.arrays: dict[Var, TileArray] = {}
        self.scopes: list[LaneScope] = []

    def at(self) -> dict[Axis, Index]:
        """Return the coordinates of all open scopes."""
        return {lane: where for scope in self.scopes for lane, where in scope.at.items()}

    def loop(self, lane: Axis, *, vectors: bool) -> tuple[Axis, LaneScope]:
        """Return a loop's axis, over elements or vectors of a lane axis, and the scope inside."""
        if not vectors:
            axis = Axis(f"{lane.name}r", lane.extent)
            self.stops[axis] = self.bounds.elements(lane)
            return axis, LaneScope({lane: index(axis)})
        axis = Axis(f"{lane.name}v", index(lane.extent.const // self.width))
        self.stops[axis] = self.bounds.groups(lane, self.width)
        return axis, LaneScope({lane: index(axis) * self.width + index(self.lane)})

    def columns(self, lane: Axis, *, pairs: bool) -> tuple[Axis, tuple[LaneScope, ...]]:
        """Return the axis of a loop over vectors, or over pairs of them, and its scopes.

        The two scopes of a pair add their statements to one body.
        """
        if not pairs:
            axis, scope = self.loop(lane, vectors=True)
            return axis, (scope,)
        axis = Axis(f"{lane.name}p", index(lane.extent.const // (2 * self.width)))
        self.stops[axis] = self.bounds.groups(lane, 2 * self.width)
        first, body = (index(axis) * self.width + index(self.lane)) * 2, list[Statement]()
        return axis, tuple(LaneScope({lane: first + half}, body) for half in range(2))

    def loop_over(self, axis: Axis, *body: Statement) -> For:
        """Return a loop over the elements, or vectors, of a lane axis that exist."""
        return For(axis, index(0), self.stops[axis], body)

    def home(self, axes: Iterable[Axis]) -> LaneScope:
        """Return the outermost scope in which all of some lanes are bound."""
        needed = set(axes) & self.storage.uses.lanes
        for scope in self.scopes:
            needed -= scope.at.keys()
            if not needed:
                return scope
        raise InternalError(f"lanes {needed} are not bound", stage="codegen.vector_nest")

    def known(self, node: Expr) -> Var | Const | None:
        if isinstance(node, Const):
            return node
        for scope in reversed(self.scopes):
            if (name := scope.memo.get(node)) is not None:
                return name
        if isinstance(node, Var) and not node.axes & self.storage.uses.lanes:
            return node
        return None

    def value(self, root: Expr) -> Var | Const:
        """Return the name of a value at the open scopes' coordinates; defines it if needed."""
        values = self.storage.uses.values

        def unknown(node: Expr) -> tuple[Expr, ...]:
            return () if self.known(node) or node in self.arrays else self.operands(values[node])

        for node in reach((root,), unknown):
            if isinstance(node, Var) and self.known(node) is None:
                stored = node in self.arrays
                self.name(node, self.read(node) if stored else self.shown(values[node]))
        found = self.known(root)
        assert found is not None
        return found

    def read(self, var: Var) -> Expr:
        """Return the load of a value from its array, converted to the value's type."""
        array = self.arrays[var]
        shown: Expr = Load(array.buffer.flat(), (array.offset(self.at(), self.width),))
        if shown.dtype is var.dtype:
            return shown
        return Cast(self.let(self.home(var.axes), var.name, shown), var.dtype)

    def shown(self, value: Expr) -> Expr:
        """Return a right-hand side over names, at the open scopes' coordinates."""
        new = {child: self.value(child) for child in self.operands(value)}
        if isinstance(value, Var | Select) and len(new) == 1:
            return next(iter(new.values()))
        return rebuild(value, new, self.at())

    def operands(self, value: Expr) -> tuple[Expr, ...]:
        """Return what a value is computed from at the open scopes' coordinates.

        Where these decide the condition of a choice, ``i < end`` for each of its bounds, that is
        one of its values alone.
        """
        if not isinstance(value, Select):
            return below(value)
        bounds, at = ends_of(value.condition, self.storage.uses.values), self.at()
        below_end = [substitute(end - i, at) for i, end in bounds or ()]
        if bounds is None or not all(n.is_constant for n in below_end):
            return below(value)
        return (value.then if all(n.const > 0 for n in below_end) else value.other,)

    def name(self, key: Var, shown: Expr) -> Var | Const:
        scope = self.home(key.axes)
        if not isinstance(shown, Var | Const):
            value, shown = shown, self.let(scope, key.name, shown)
            if key in self.forms and isinstance(value, Op):
                self.formed.append((shown, self.forms[key]))
        scope.memo[key] = shown
        return shown

    def let(self, scope: LaneScope, hint: str, value: Expr) -> Var:
        var = self.var(hint, value.dtype, value.axes & {self.lane})
        scope.body.append(Let(var, value))
        return var

    def var(self, hint: str, dtype: DType, axes: frozenset[Axis]) -> Var:
        return Var(self.names.new(hint), dtype, axes)

    def store(self, array: TileArray, value: Var | Const) -> None:
        """Append a store of a value to its element of an array, in the innermost scope."""
        kind = array.buffer.dtype
        if value.dtype is not kind:
            value = self.let(self.scopes[-1], "held", Cast(value, kind))
        where = array.offset(self.at(), self.width)
        self.scopes[-1].body.append(Put(array.buffer.flat(), where, value, None))


def held_type(dtype: DType) -> DType:
    """Return the element type of an array: f32 for f16, which CPUs do not multiply."""
    return F32 if dtype is F16 else dtype


@dataclass(frozen=True, slots=True)
class _Sum:
    """A reduction of the open inner loop, and one accumulator for each copy of its iteration."""

    var: Var
    node: Reduce
    parts: list[Var]


@dataclass(slots=True, eq=False)
class _Inner:
    """An open inner loop of a nest.

    Attributes:
        pairs: whether its copies are the even and the odd elements of two vectors.
        copies: scopes of the copies of an iteration that run side by side. The innermost scopes of
            all copies have one body.
        rest: the loop over the elements that do not fill all copies, and its scope.
    """

    lanes: tuple[Axis, ...]
    pairs: bool
    axes: list[Axis]
    copies: list[list[LaneScope]]
    rest: tuple[For, LaneScope] | None = None
    sums: list[_Sum] = field(default_factory=list)


class Nest:
    """Statements that share an outer loop.

    Attributes:
        outer: candidates for this loop: its axis (None: no loop), and whether it is over vectors.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer, self.uses = writer, writer.storage.uses
        self.items: list[Item] = []
        self.outer: set[tuple[Axis | None, bool]] = set()
        self.inner: _Inner | None = None

    def takes(self, item: Item) -> bool:
        """Return True if a statement can be added to the nest."""
        return not self.items or bool(self.outer & self._outer(item) - {(None, False)})

    def add(self, item: Item) -> None:
        """Append a statement."""
        found = self._outer(item)
        self.outer = self.outer & found if self.items else found
        self.items.append(item)

    def _outer(self, item: Item) -> set[tuple[Axis | None, bool]]:
        free = domain = self.uses.domain(item)
        if isinstance(item, Let) and isinstance(item.value, Reduce):
            free = domain - frozenset(item.value.over)
        if not free:
            return {(None, False)}
        lanes = self.writer.storage.order.sorted(domain)
        if isinstance(item, Let) and item.var in self.writer.storage.paired:
            return {(lanes[-1], True)}  # the rows of an iteration are stored together
        if len(lanes) == 1:
            return {(lanes[0], True), (lanes[0], False)}
        return {(lane, lane is lanes[-1]) for lane in free}

    # -- writing -----------------------------------------------------------------------------------

    def write(self) -> None:
        """Append the nest to the innermost scope."""
        if not self.items:
            return
        flat = all(len(self.uses.domain(item)) == 1 for item in self.items)
        lane, vectors = min(
            self.outer, key=lambda o: (o[1] is not flat, o[0].serial if o[0] else 0)
        )
        writer = self.writer
        if lane is not None:
            axis, scope = writer.loop(lane, vectors=vectors)
            writer.scopes.append(scope)
        for item in self.items:
            self._item(item, lane, vectors)
        self._close()
        if lane is not None:
            writer.scopes.pop()
            writer.scopes[-1].body.append(writer.loop_over(axis, *scope.body))

    def _item(self, item: Item, outer: Axis | None, vectors: bool) -> None:
        storage = self.writer.storage
        lanes = storage.order.sorted(self.uses.domain(item) - {outer})
        pairs = bool(lanes) and not vectors and storage.in_pairs(reads(item), lanes[-1])
        if self.inner is not None:
            others = bool(lanes) and (self.inner.lanes, self.inner.pairs) != (lanes, pairs)
            if others or (not lanes and isinstance(item, Update)) or self._waits(item):
                self._close()
        if not lanes:
            self._emit(item)
            return
        if self.inner is None:
            self.inner = self._open(lanes, jammed=vectors, pairs=pairs)
        inner = self.inner
        if isinstance(item, Let) and isinstance(item.value, Reduce):
            inner.sums.append(self._start(item.var, item.value, len(inner.copies)))
        rest = [] if inner.rest is None else [[inner.rest[1]]]
        for number, scopes in enumerate([*inner.copies, *rest]):
            self.writer.scopes.extend(scopes)
            if isinstance(item, Let) and isinstance(item.value, Reduce):
                self._reduce(item.value, inner.sums[-1].parts[number % len(inner.copies)])
            else:
                self._emit(item)
            del self.writer.scopes[-len(scopes) :]

    def _waits(self, item: Item) -> bool:
        """Return True if a statement needs the result of a reduction in the open inner loop."""
        assert self.inner is not None
        read = self.writer.storage.leaves(reads(item))
        return not read.isdisjoint(s.var for s in self.inner.sums)

    def _open(self, lanes: tuple[Axis, ...], *, jammed: bool, pairs: bool) -> _Inner:
        if jammed:
            (lane,) = lanes
            jam = self.uses.code.jam
            axis = Axis(f"{lane.name}j", index(lane.extent.const // jam))
            body: list[Statement] = []
            copies = [[LaneScope({lane: index(axis) * jam + copy}, body)] for copy in range(jam)]
            each, scope = self.writer.loop(lane, vectors=False)
            elements, count = self.writer.stops[each], self.writer.bounds.partial(lane, jam)
            self.writer.stops[axis] = tuple(floordiv(n, index(jam)) for n in elements)
            if count is None:
                return _Inner(lanes, pairs, [axis], copies)
            first = floordiv(count, index(jam)) * jam
            return _Inner(lanes, pairs, [axis], copies, (For(each, first, elements, ()), scope))
        *rows, column = lanes
        loops = [self.writer.loop(lane, vectors=False) for lane in rows]
        axis, scopes = self.writer.columns(column, pairs=pairs)
        around = [scope for _, scope in loops]
        axes = [*(axis for axis, _ in loops), axis]
        return _Inner(lanes, pairs, axes, [[*around, scope] for scope in scopes])

    def _start(self, var: Var, node: Reduce, copies: int) -> _Sum:
        writer, (neutral,) = self.writer, identities(node)
        parts = []
        for _ in range(copies):
            parts.append(writer.var(f"{var.name}_acc", neutral.dtype, frozenset({writer.lane})))
            writer.scopes[-1].body.append(Carry(parts[-1], neutral))
        return _Sum(var, node, parts)

    def _reduce(self, node: Reduce, part: Var) -> None:
        value = self.writer.value(node.body)
        (total,) = combine(node.monoid, (part,), (value,))
        self.writer.scopes[-1].body.append(Update(part, total))

    def _close(self) -> None:
        """End the open inner loop, and name its reductions' results."""
        if self.inner is None:
            return
        inner, self.inner = self.inner, None
        body: tuple[Statement, ...] = ()
        for axis, scope in reversed(list(zip(inner.axes, inner.copies[0], strict=True))):
            body = (self.writer.loop_over(axis, *scope.body, *body),)
        self.writer.scopes[-1].body.extend(body)
        if inner.rest is not None:
            loop, scope = inner.rest
            self.writer.scopes[-1].body.append(replace(loop, body=tuple(scope.body)))
        for found in inner.sums:
            self._finish(found, folds=inner.pairs or len(inner.copies) == 1)

    def _finish(self, found: _Sum, *, folds: bool) -> None:
        writer, var = self.writer, found.var
        here = writer.scopes[-1]
        first, *others = found.parts
        for other in others:
            (total,) = combine(found.node.monoid, (first,), (other,))
            first = writer.let(here, var.name, total)
        if folds:
            total = folded(found.node.monoid, (writer.lane,), (first,))
            if not var.axes & self.uses.lanes:
                here.body.append(Let(var, total))
                return
            first = writer.let(here, var.name, total)
        here.memo[var] = first
        writer.store(writer.arrays[var], first)

    def _is_bounded(self, guard: Expr) -> bool:
        """Return True if the loops over elements stop where a guard does: vectors need a mask."""
        writer, ends = self.writer, self.uses.counts(guard)
        return ends is not None and all(
            writer.lane not in writer.at()[lane].axes
            and writer.bounds.here(end) in writer.bounds.elements(lane)
            for lane, end in ends.items()
        )

    def _emit(self, item: Item) -> None:
        writer = self.writer
        match item:
            case Carry(var=var):
                writer.store(writer.arrays[var], item.initial)
            case Let(var=var, value=value) | Update(var=var, value=value):
                writer.store(writer.arrays[var], writer.name(var, writer.shown(value)))
            case Put():
                stored = writer.value(item.value)
                guard: Var | Const | None = None
                if item.guard is not None and not self._is_bounded(item.guard):
                    guard = writer.value(item.guard)
                assert guard is None or isinstance(guard, Var)
                offset = substitute(item.offset, writer.at(), writer.value)
                writer.scopes[-1].body.append(Put(item.buffer, offset, stored, guard))
