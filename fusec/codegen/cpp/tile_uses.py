"""Def-use information of a program of tiles, before its tiles become arrays and vectors.

``TileUses`` has the definition and the uses of each value, the number of unmasked elements of a
load along each axis, and the lane axes that a statement runs over.

Worked example: in ``for n: s<m, n> = dot(k: a, b); e<m, n> = exp(s); c := dot(n: e, v, c)`` the
value e is the left operand of a product, v the right one, and both are read only in the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fusec.codegen.lowering.layout import ends_of
from fusec.ir.dtype import F32
from fusec.ir.expr import Dot, Expr, Load, Reduce, Var, substitute
from fusec.ir.index import Axis, Index, index, is_nonnegative, least, mod, most, product
from fusec.ir.machine import CodeTuning
from fusec.ir.program import PACKED, Carry, For, Let, Program, Put, Statement, Update, reads

Place = tuple[int, ...]
"""Path of a statement: its position in each enclosing block, the outermost first."""


@dataclass(slots=True, eq=False)
class TileUses:
    """Definitions and uses of the values of a program of tiles.

    Attributes:
        lanes: the lane axes of tiles.
        values: name -> defining expression, without carries.
        defined: name -> path of its definition.
        readers: value -> statements that use it, and their paths.
        updates: carry -> paths of its updates.
        at: path -> the statement there.
        written: buffers that the program stores to.
        code: how the program is printed.
        width: elements of a vector; a product stops at the last one with a column that exists.
        ends: lane axis -> upper bounds of the lanes that exist, as of the program.
    """

    lanes: frozenset[Axis]
    written: frozenset[object]
    code: CodeTuning
    width: int
    ends: Mapping[Axis, tuple[Index, ...]]
    values: dict[Expr, Expr] = field(default_factory=dict)
    defined: dict[Var, Place] = field(default_factory=dict)
    readers: dict[Expr, list[tuple[Statement, Place]]] = field(default_factory=dict)
    updates: dict[Var, list[Place]] = field(default_factory=dict)
    at: dict[Place, Statement] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, width: int) -> TileUses:
        """Collect the definitions and uses of a program's values."""
        written = frozenset(b.base for b in program.writes)
        lanes, ends = frozenset(program.lanes), dict(program.counts)
        uses = TileUses(lanes, written, program.code, width, ends)
        for place, statement in placed(program.body):
            uses.at[place] = statement
            if isinstance(statement, Let | Carry):
                uses.defined[statement.var] = place
            if isinstance(statement, Let):
                uses.values[statement.var] = statement.value
            if isinstance(statement, Update):
                uses.updates.setdefault(statement.var, []).append(place)
            for name in dict.fromkeys(reads(statement)):
                uses.readers.setdefault(name, []).append((statement, place))
        return uses

    def domain(self, statement: Statement) -> frozenset[Axis]:
        """Return the lane axes that a statement runs over, including reduced ones."""
        match statement:
            case Let(var=var, value=Reduce() as value):
                return (var.axes | value.body.axes | frozenset(value.over)) & self.lanes
            case Let() | Update() | Carry():
                return statement.var.axes & self.lanes
            case Put():
                guard = statement.guard.axes if statement.guard is not None else frozenset()
                return (statement.offset.axes | statement.value.axes | guard) & self.lanes
            case _:
                return frozenset()

    def dots(self, var: Var) -> Iterator[tuple[Statement, Dot]]:
        """Yield the products that read a value as an operand."""
        for statement, _ in self.readers.get(var, ()):
            match statement:
                case Let(value=Dot() as dot) | Update(value=Dot() as dot):
                    if var in (dot.left, dot.right):
                        yield statement, dot

    def opening(self, carry: Carry) -> tuple[For, Dot] | None:
        """Return the loop whose first trip may overwrite a carry of 0 with its product, or None.

        The loop runs, adds one product to the carry in each trip, and nothing else uses it before
        the end of the loop.
        """
        uses = [*self.updates.get(carry.var, ()), *(p for _, p in self.readers.get(carry.var, ()))]
        place = min(uses, default=())
        around = place[:-1]
        match self.at.get(around), self.at.get(place):
            case For() as loop, Update(value=Dot() as dot):
                follows = around[:-1] == self.defined[carry.var][:-1]
                runs = all(stop.is_constant and stop.const > 0 for stop in loop.stops)
                later = all(where[: len(around)] > around for where in uses if where != place)
                opens = carry.initial.value == 0 and loop.start is index(0)
                return (loop, dot) if opens and runs and follows and later else None
        return None

    def elementwise(self, var: Var) -> bool:
        """Return True if a value has a use other than as an operand of a product."""
        return len(self.readers.get(var, ())) > len(list(self.dots(var)))

    def counts(self, guard: Expr | None) -> Mapping[Axis, Index] | None:
        """Return lane axis -> number of leading elements that a guard lets through.

        None if the guard is not a conjunction of such upper bounds, one an axis.
        """
        ends = ends_of(guard, self.values)
        found: dict[Axis, Index] = {}
        for here, end in ends or ():
            left = end - here
            lanes = left.axes & self.lanes
            if len(lanes) != 1:
                return None
            (lane,) = lanes
            count = left + index(lane)
            if lane in count.axes or lane in found:
                return None
            found[lane] = count
        return None if ends is None else found

    def load(self, var: Expr) -> Load | None:
        """Return the load that defines a value, or None if the program writes its buffer."""
        value = self.values.get(var)
        if isinstance(value, Load) and value.buffer.base not in self.written:
            return value
        return None

    def direct(self, var: Expr, rows: Axis, columns: Axis, *, right: bool) -> Load | None:
        """Return the load of an operand that a product can read in place, or None.

        A right operand's columns must be contiguous in f32, and lie in the buffer also where they
        are masked, as those of a padded panel do; of bf16 and int8, pairs of terms are packed in
        any case (``f_multiply_bf16``, ``f_multiply_i8``).
        """
        load = self.load(var)
        if load is None or load.dtype not in (F32, *PACKED):
            return None
        if any(gather.axes & self.lanes for gather in load.gathers):
            return None
        (offset,) = load.indices
        steps = [offset.coefficient(axis) for axis in (rows, columns)]
        counts = self.counts(load.guard)
        if counts is None or any(s is None or s.axes & self.lanes for s in steps):
            return None
        others = {axis: count for axis, count in counts.items() if axis is not columns}
        # A product stops where the axis ends: a load's own mask may let fewer columns through.
        count = counts.get(columns)
        whole = count in self.ends.get(columns, ()) and mod(count, index(self.width)) is index(0)
        ragged = count is not None and not whole
        if right and ragged and not self._is_inside(var, load, others):
            return None
        if right and load.dtype is F32 and steps[1] is not index(1):
            return None
        return load

    def _is_inside(self, var: Expr, load: Load, counts: Mapping[Axis, Index]) -> bool:
        """Return True if the dense buffer of a value's load has an element for each masked lane.

        Args:
            counts: lane axis -> number of leading elements that are read.
        """
        assert isinstance(var, Var)
        place, stops = self.defined[var], dict(counts)
        for loop in (self.at[place[:depth]] for depth in range(1, len(place))):
            if isinstance(loop, For) and len(loop.stops) == 1:
                stops[loop.axis] = loop.stops[0]
        (offset,), size = load.indices, product(load.buffer.base.shape)
        low = high = offset
        for axis, stop in stops.items():
            step, end = offset.coefficient(axis), {axis: stop - 1}
            if step is not None and is_nonnegative(step):
                high = substitute(high, end)
            elif step is not None and is_nonnegative(-step):
                low = substitute(low, end)
        first, last = least(low), most(high)
        if first is None or last is None:
            return False
        return first >= 0 and size.is_constant and last < size.const

    def in_pairs(self, offset: Index, lane: Axis) -> bool:
        """Return True if two neighbours along a lane axis share an element, as weights a byte."""
        low, high = (substitute(offset, {lane: index(lane) * 2 + half}) for half in range(2))
        whole = lane.extent.const % (2 * self.width) == 0
        return whole and low is high and low.steps_by_one(lane)

    def steps_by_one(self, offset: Index, lane: Axis) -> bool:
        """Return True if vectors along a lane axis read one place after another, or pairs do."""
        return offset.steps_by_one(lane) or self.in_pairs(offset, lane)

    def is_turned(self, load: Load, row: Axis, column: Axis) -> bool:
        """Return True for a load that is contiguous along a tile's rows: a transposed tile."""
        (offset,) = load.indices
        along = offset.coefficient(column)
        if load.gathers or along is None or along.axes & self.lanes:
            return False
        return (
            offset.steps_by_one(row)
            and along is not index(1)
            and self.counts(load.guard) is not None
        )


def placed(body: Iterable[Statement], above: Place = ()) -> Iterator[tuple[Place, Statement]]:
    """Yield each statement with its path, a loop before the statements in it."""
    for position, statement in enumerate(body):
        place = (*above, position)
        yield place, statement
        if isinstance(statement, For):
            yield from placed(statement.body, place)
