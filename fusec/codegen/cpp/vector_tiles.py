"""Lower tiles to arrays and vectors: the form in which a CPU runs programs with matrix products.

A program with ``Dot``s works on tiles: values with an element for each index of one or two lane
axes. A GPU holds them in registers; a CPU's core holds them in arrays in its cache, and works on
one vector of W elements after another. So every lane axis becomes a loop, over its elements or over
vectors of them, and one lane axis is left, of W lanes:

* some values are ``Scratch`` arrays (``tile_storage.py``), others are computed at each use;
* adjacent statements that share a lane axis run in one loop over it (``vector_nest.py``);
* a ``Dot`` becomes a ``Multiply`` of matrices in memory. An operand that is loaded only for it is
  read in place if it is contiguous along its columns; else it is copied to panels first. An
  accumulator that is a slot of an array that outlives the loop is updated in place.

``lane_order.py`` chooses the vectorized axis of a tile.

Worked example, with lanes m and n of 32 and W = 16::

    s<m, n> = dot(k: a, b)          s[32*i + j] = a[...] @ b[...] for 32 x 32 x 64
    e<m, n> = exp(s)                for m in 0 .. 32:
    t<m> = sum(n: e)                  carry t<l> = 0.0
    y[m] = t                          for no in 0 .. 2:
                                        s<l> = s[32*m + 16*no + l];  e<l> = exp(s);  t := t + e
                                      y[m] = sum(l: t)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusec.codegen.cpp.lane_order import lane_order
from fusec.codegen.cpp.shared_operands import join_operands
from fusec.codegen.cpp.tile_bounds import TileBounds, drop_operand_masks
from fusec.codegen.cpp.tile_storage import Storage
from fusec.codegen.cpp.tile_uses import TileUses
from fusec.codegen.cpp.vector_nest import Item, LaneScope, Nest, TileArray, Writer, held_type
from fusec.codegen.lowering.precision import forms_of_tiles, rounded_forms
from fusec.ir.dtype import I64, DType
from fusec.ir.expr import (
    Buffer,
    Const,
    Dot,
    Expr,
    IndexValue,
    Load,
    Op,
    Var,
    index_exprs,
    substitute,
)
from fusec.ir.index import Axis, Index, floordiv, index, is_nonnegative
from fusec.ir.names import Names
from fusec.ir.program import (
    Carry,
    For,
    Let,
    Matrix,
    Multiply,
    Program,
    Put,
    Scratch,
    Statement,
    Update,
    map_statements,
    statements,
)


def vector_tiles(program: Program, width: int) -> Program:
    """Return a program of tiles over vectors of ``width`` lanes.

    Of other programs only the functions that may be approximate are named.

    A product with an empty sum has tiles but no ``Dot``. A transformed product has none, either.
    """
    in_memory = any(isinstance(s, Multiply) for s in statements(program.body))
    if in_memory or (len(program.lanes) < 2 and not program.multiplies):
        rounded = tuple(rounded_forms(program, "erf", "ndtr").items())
        return replace(program, approximate=rounded) if rounded else program
    program = join_operands(drop_operand_masks(program, width))
    rewrite = _Rewrite(program, width)
    body = _without_unread(rewrite.block(program.body))
    approximate = tuple(rewrite.writer.formed)
    return replace(program, lanes=(rewrite.writer.lane,), body=body, approximate=approximate)


class _Rewrite:
    """The rewriting of one program.

    Attributes:
        panels: operand of a product and the axis of its rows -> a copy in panels.
        slots: product accumulated in place -> its tile of a larger array.
        opened: carry that the first trip of a loop overwrites -> the axis of the loop.
    """

    def __init__(self, program: Program, width: int) -> None:
        uses = TileUses.of(program, width)
        self.uses, self.order, self.width = uses, lane_order(program, uses), width
        self.storage = Storage.of(uses, self.order)
        named = (s.var.name for s in statements(program.body) if isinstance(s, Let | Carry))
        self.names = Names(named)
        self.bounds, forms = TileBounds.of(program), forms_of_tiles(program)
        self.writer = Writer(self.storage, self.names, width, self.bounds, forms)
        self.nest = Nest(self.writer)
        self.panels: dict[tuple[Var, Axis], TileArray] = {}
        self.slots: dict[Var, TileArray] = {}
        self.opened: dict[Var, Axis] = {}

    # -- blocks ------------------------------------------------------------------------------------

    def block(self, body: Iterable[Statement]) -> tuple[Statement, ...]:
        """Return the rewritten statements of a block."""
        self.writer.scopes.append(LaneScope({}))
        for statement in body:
            self.statement(statement)
        self.flush()
        return tuple(self.writer.scopes.pop().body)

    @property
    def out(self) -> list[Statement]:
        return self.writer.scopes[-1].body

    def flush(self) -> None:
        """End the open nest."""
        nest, self.nest = self.nest, Nest(self.writer)
        nest.write()

    def add(self, item: Item) -> None:
        if not self.nest.takes(item):
            self.flush()
        self.nest.add(item)

    def statement(self, statement: Statement) -> None:
        match statement:
            case Let(var=var, value=Dot(into=Var() as slot) as dot):
                self.flush()
                self.writer.arrays[var] = self.slots[var] = self.slot(slot)
                self.multiply(dot, self.slots[var], adds=index(1))
            case Put(value=Var() as var) if var in self.slots:
                pass  # the product has been accumulated in place
            case Let(var=var, value=Dot() as dot):
                self.flush()
                self.multiply(dot, self.array(var), adds=index(0))
                self.pack(var)
            case Update(var=var, value=Dot() as dot):
                self.flush()
                first = self.bounds.loops[-1].axis if self.bounds.loops else None
                adds = index(first) if first and self.opened.get(var) is first else index(1)
                self.multiply(dot, self.writer.arrays[var], adds=adds)
            case Carry(var=var) if self.uses.domain(statement):
                self.array(var)
                if not self.opens(statement):
                    self.add(statement)
            case Let(var=var) if self.uses.domain(statement):
                if var in self.storage.stored:
                    if var.axes & self.uses.lanes:
                        self.array(var)
                    self.add(statement)
                self.pack(var)
            case Update() | Put() if self.uses.domain(statement):
                self.add(statement)
            case For():
                self.flush()
                self.bounds.loops.append(statement)
                self.out.append(replace(statement, body=self.block(statement.body)))
                self.bounds.loops.pop()
            case _:
                self.flush()
                self.out.append(statement)

    def array(self, var: Var) -> TileArray:
        """Declare the array of a tile."""
        *rows, column = self.order.sorted(var.axes & self.uses.lanes)
        made = self.scratch(var.name, (*rows, column), held_type(var.dtype))
        pairs = var in self.storage.paired
        self.writer.arrays[var] = TileArray(made, rows[0] if rows else None, column, pairs=pairs)
        if not rows and self.bounds.partial(column, self.width):
            self.fill(self.writer.arrays[var])  # its last vector may be read, and written in part
        return self.writer.arrays[var]

    def slot(self, var: Var) -> TileArray:
        """Return the tile of a larger array that a value was loaded from."""
        if var in self.slots:
            return self.slots[var]
        load = self.uses.load(var)
        assert load is not None
        row, column = self.order.sorted(var.axes & self.uses.lanes)
        (offset,) = load.indices
        assert offset.coefficient(column) is index(1)
        assert offset.coefficient(row) is column.extent
        start = substitute(offset, dict.fromkeys((row, column), index(0)))
        return TileArray(load.buffer.base, row, column, start=start)

    def scratch(self, hint: str, lanes: Iterable[Axis], dtype: DType) -> Buffer:
        length = index(1)
        for lane in lanes:
            length = length * lane.extent
        name = self.names.new(f"a_{hint.removeprefix('v_')}")
        buffer = Buffer(name, (length,), (index(1),), dtype)
        self.out.append(Scratch(buffer, length))
        return buffer

    # -- products ----------------------------------------------------------------------------------

    def multiply(self, dot: Dot, into: TileArray, *, adds: Index) -> None:
        """Append the ``Multiply`` for a ``Dot`` of tiles."""
        left, right = self.order.sides(dot)
        (terms,), rows, columns = dot.over, into.row, into.column
        assert rows is not None
        counts = {axis: [*self.bounds.elements(axis)] for axis in (rows, terms)}
        known = len(counts[rows])
        first = self.operand(left, rows, terms, counts, right=False)
        second = self.operand(right, terms, columns, counts, right=True)
        if len(counts[rows]) > known and adds is index(0):
            self.fill(into, counts[rows][known:])
        self.out.append(
            Multiply(
                into.matrix(rows, self.width),
                first,
                second,
                tuple(counts[rows]),
                self.bounds.groups(columns, self.width),
                tuple(counts[terms]),
                self.width,
                adds,
            )
        )

    def opens(self, carry: Carry) -> bool:
        """Return True if a product overwrites all of a carry before it is read: no fill is needed.

        A load's own mask may leave out rows of a product.
        """
        opening = self.uses.opening(carry)
        if opening is None:
            return False
        loop, dot = opening
        for operand in (dot.left, dot.right):
            load = self.uses.load(operand)
            counts = {} if load is None else self.uses.counts(load.guard) or {}
            for axis in counts.keys() & dot.axes:
                if self.bounds.here(counts[axis]) not in self.bounds.elements(axis):
                    return False
        self.opened[carry.var] = loop.axis
        return True

    def operand(
        self, var: Expr, rows: Axis, columns: Axis, counts: dict[Axis, list[Index]], *, right: bool
    ) -> Matrix:
        """Return an operand as a matrix; adds the bounds of its rows and terms to ``counts``."""
        assert isinstance(var, Var)
        load = self.uses.direct(var, rows, columns, right=right)
        if load is None:
            array = self.panels.get((var, rows)) if right else None
            return (array or self.writer.arrays[var]).matrix(rows, self.width)
        (offset,) = load.indices
        for axis, end in (self.uses.counts(load.guard) or {}).items():
            known = counts.get(axis)  # of columns of a panel there is none: what pads it is unseen
            if known is not None and (count := self.bounds.here(end)) not in known:
                known.append(count)
        row, column = (offset.coefficient(axis) for axis in (rows, columns))
        assert row is not None and column is not None
        start = substitute(offset, dict.fromkeys((rows, columns), index(0)))
        return Matrix(load.buffer.base, start, row, column, column * self.width)

    def fill(self, array: TileArray, counts: Sequence[Index] = ()) -> None:
        """Fill a tile with 0, except for the leading rows that will be written.

        Args:
            counts: upper bounds of their number; unless it is exactly one, all rows are filled.
        """
        zero = Const(0, array.buffer.dtype)
        if array.row is None:
            panel, scope = self.writer.loop(array.column, vectors=True)
            put = Put(array.buffer.flat(), array.offset(scope.at, self.width), zero, None)
            self.out.append(self.writer.loop_over(panel, put))
            return
        each, panel, where = self.loops(array.row, array.column)
        put = Put(array.buffer.flat(), array.offset(where, self.width), zero, None)
        known = len(counts) == 1 and is_nonnegative(counts[0]) and not any(index_exprs(counts[0]))
        first = counts[0] if known else index(0)
        fill = self.writer.loop_over(each, self.writer.loop_over(panel, put))
        self.out.append(replace(fill, start=first))

    def loops(self, row: Axis, column: Axis) -> tuple[Axis, Axis, dict[Axis, Index]]:
        """Return loop axes over rows and over vectors of columns, and the coordinates in them."""
        each, rows = self.writer.loop(row, vectors=False)
        panel, columns = self.writer.loop(column, vectors=True)
        return each, panel, rows.at | columns.at

    # -- copies in panels --------------------------------------------------------------------------

    def pack(self, var: Var) -> None:
        """Copy a tile to panels, for each pair of row and column axes that ``Storage`` lists."""
        for row, column in self.storage.panels.get(var, ()):
            self.flush()
            buffer = self.scratch(var.name, (row, column), held_type(var.dtype))
            array = TileArray(buffer, row, column, panels=True)
            load = self.uses.load(var)
            if load is None:
                source = self.writer.arrays[var]
                where = {lane: index(lane) for lane in (row, column)}
                load = Load(source.buffer.flat(), (source.offset(where, self.width),))
            if self.uses.is_turned(load, row, column):
                self.turn(load, array)
            else:
                each, panel, at = self.loops(row, column)
                self.writer.scopes.append(LaneScope(at))
                self.writer.store(array, self.writer.value(var))
                inner = self.writer.scopes.pop().body
                over = self.writer.loop_over
                self.out.append(over(panel, over(each, *inner)))
            self.panels[var, row] = array
            if self.storage.is_turned(var) and var not in self.storage.stored:
                self.writer.arrays[var] = array

    def turn(self, load: Load, array: TileArray) -> None:
        """Copy a tile that is contiguous along its rows, transposing blocks of W x W."""
        row, column, width, lane = array.row, array.column, self.width, self.writer.lane
        assert row is not None
        counts = self.uses.counts(load.guard) or {}
        if row in counts:
            self.fill(array)
        block = Axis(f"{row.name}b", index(row.extent.const // width))
        ends = (*self.bounds.groups(row, width), *self._blocks(counts.get(row)))
        self.writer.stops[block] = tuple(dict.fromkeys(ends))
        panel, columns = self.writer.loop(column, vectors=True)
        each = Axis(f"{row.name}r", index(width))
        at = {row: index(block) * width + index(each), **columns.at}
        stops = [each.extent]
        if row in counts:
            stops.append(counts[row] - index(block) * width)
        guard, copied, turned = LaneScope({}), LaneScope({}), LaneScope(at)
        mask, count = None, counts.get(column, self.bounds.partial(column, width))
        if count is not None:
            mask = self.mask(at[column], count, guard)
        offset = substitute(load.indices[0], at)
        name = self.names.new("a_block")
        temporary = Buffer(name, (index(width * width),), (index(1),), load.dtype)
        slot = index(each) * width + index(lane)
        read = self.writer.let(copied, "v_block", Load(load.buffer, (offset,), mask))
        copied.body.append(Put(temporary.flat(), slot, read, None))
        copy = For(each, index(0), tuple(stops), tuple(copied.body))
        again = self.writer.let(turned, "v_block", Load(temporary.flat(), (slot,)))
        self.writer.scopes.append(turned)
        self.writer.store(array, again)
        self.writer.scopes.pop()
        store = For(each, index(0), tuple(stops), tuple(turned.body))
        declared = Scratch(temporary, index(width * width))
        over = self.writer.loop_over
        self.out.append(over(panel, *guard.body, over(block, declared, copy, store)))

    def _blocks(self, count: Index | None) -> tuple[Index, ...]:
        """Return how many vectors have some of so many elements, if a mask says so."""
        return () if count is None else (floordiv(count + (self.width - 1), index(self.width)),)

    def mask(self, position: Index, count: Index, scope: LaneScope) -> Var:
        """Define and return the vector mask ``position < count``."""
        sides = [self.writer.let(scope, "v_i", IndexValue(end, I64)) for end in (position, count)]
        return self.writer.let(scope, "v_t", Op("lt", tuple(sides)))


def _without_unread(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Remove arrays that are never read, the stores to them, and their products."""
    read: set[Buffer] = set()
    made: set[Buffer] = set()
    for statement in statements(body):
        match statement:
            case Let(value=Load() as load):
                read.add(load.buffer.base)
            case Multiply():
                read |= {m.buffer.base for m in (statement.left, statement.right)}
            case Scratch():
                made.add(statement.buffer)
    unread = made - read

    def kept(statement: Statement) -> tuple[Statement, ...]:
        match statement:
            case Put() | Scratch() if statement.buffer.base in unread:
                return ()
            case Multiply() if statement.into.buffer.base in unread:
                return ()
        return (statement,)

    # What only a dropped product has read is not read any more.
    return _without_unread(map_statements(body, kept)) if unread else body
