"""Load and store neighbours in memory together, where lanes are two elements apart.

Features that are rotated in pairs, and the parts of complex numbers, are loads and stores of every
other element (``passes/kernel/unroll_parts.py``), for which a thread moves 2 or 4 bytes at a time.
Both of a pair are one tile of twice as many lanes, 16 bytes a thread, whose elements already are in
the registers of the thread that needs them.

A pair has one guard, which does not vary along its lanes, and its lanes are the columns of a tile.

Worked example, ``y = (a*x0 - b*x1, b*x0 + a*x1)``::

    x0 = x[2*c];  x1 = x[2*c + 1]        lanes c:64        w = x[cc];  unzip w: x0, x1
    y[2*c] = y0;  y[2*c + 1] = y1                          z = zip y0, y1;  y[cc] = z
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from fusec.ir.expr import Buffer, Expr, Load, Var
from fusec.ir.index import Axis, Index, index
from fusec.ir.names import Names
from fusec.ir.program import (
    Carry,
    For,
    Let,
    Program,
    Put,
    Statement,
    Unzip,
    Update,
    Zip,
    statements,
)

_Key = tuple[Buffer, Index, Expr | None]
_Access = TypeVar("_Access", Let, Put)


def join_pairs(program: Program) -> Program:
    """Return a program with pairs along its last lane axis joined, and the axis of both elements
    as a lane axis behind the others; the same program where it has no pairs.
    """
    if program.multiplies or not program.lanes:
        return program
    named = (s.var.name for s in statements(program.body) if isinstance(s, Let | Carry))
    overlaid = frozenset(b.base for b in program.overlaid)
    pairs = _Pairs(program.lanes[-1], Names(named), overlaid)
    body = pairs.block(program.body)
    if pairs.whole is None:
        return program
    return replace(program, body=body, lanes=(*program.lanes, pairs.whole))


@dataclass(slots=True)
class _Pairs:
    """Pairs the accesses of a program along one lane axis.

    Attributes:
        lane: the axis, along which pairs are two elements apart.
        overlaid: buffers that may share memory with others.
        whole: the axis of both elements of all pairs, once there is a pair.
    """

    lane: Axis
    names: Names
    overlaid: frozenset[Buffer]
    whole: Axis | None = field(default=None, init=False)

    def block(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """Return a block with the accesses of pairs joined."""
        loads = self._loads(body)
        stores = self._stores(body)
        done: list[Statement] = []
        for statement in body:
            if isinstance(statement, For):
                done.append(replace(statement, body=self.block(statement.body)))
            elif statement in loads:
                done += self._loaded(*loads[statement])
            elif statement in stores:
                done += self._stored(*stores[statement])
            else:
                done.append(statement)
        return tuple(done)

    def _loads(self, body: tuple[Statement, ...]) -> dict[Statement, tuple[Let, ...]]:
        """Return each load of a pair -> both of them, the lower first; () where the later one is.

        No store to their buffer is between them.
        """
        found: dict[Statement, tuple[Let, ...]] = {}
        waiting: dict[_Key, Let] = {}
        for statement in body:
            match statement:
                case Let(value=Load(buffer=buffer, indices=(offset,), guard=guard)):
                    which = self._which(buffer, offset, guard)
                    if which is None:
                        continue
                    low = offset - which
                    other = waiting.pop((buffer, low + (1 - which), guard), None)
                    if other is None:
                        waiting[buffer, offset, guard] = statement
                    else:
                        pair = (other, statement) if which else (statement, other)
                        found[other], found[statement] = pair, ()
                case Put(buffer=buffer):
                    waiting = self._apart(waiting, buffer)
                case For():
                    waiting.clear()
        return found

    def _stores(self, body: tuple[Statement, ...]) -> dict[Statement, tuple[Put, ...]]:
        """Return each store of a pair -> both, the lower first; () where the earlier one is.

        Nothing is loaded from their buffer between them.
        """
        found: dict[Statement, tuple[Put, ...]] = {}
        waiting: dict[_Key, Put] = {}
        for statement in body:
            match statement:
                case Put(buffer=buffer, offset=offset, value=Var(axes=axes), guard=guard):
                    which = self._which(buffer, offset, guard)
                    if which is None or self.lane not in axes:
                        continue
                    other = waiting.pop((buffer, offset + (1 - 2 * which), guard), None)
                    if other is None:
                        waiting[buffer, offset, guard] = statement
                    elif isinstance(other.value, Var) and other.value.axes == axes:
                        pair = (other, statement) if which else (statement, other)
                        found[other], found[statement] = (), pair
                case Let(value=Load(buffer=buffer)):
                    waiting = self._apart(waiting, buffer)
                case For() | Update():
                    waiting.clear()
        return found

    def _apart(self, waiting: dict[_Key, _Access], buffer: Buffer) -> dict[_Key, _Access]:
        """Return the accesses of memory that a buffer does not share."""
        if buffer.base in self.overlaid:
            return {}
        return {key: one for key, one in waiting.items() if key[0].base is not buffer.base}

    def _which(self, buffer: Buffer, offset: Index, guard: Expr | None) -> int | None:
        """Return which of a pair's elements an access has in each lane, or None for no pair."""
        if not buffer.dtype.is_float or (guard is not None and self.lane in guard.axes):
            return None
        if offset.coefficient(self.lane) is not index(2):
            return None
        which = offset % 2
        return which.const if which.is_constant else None

    def _both(self, low: Index) -> Index:
        """Return the offset of both elements of a pair, from that of the lower one."""
        if self.whole is None:
            self.whole = Axis(f"{self.lane.name}{self.lane.name}", self.lane.extent * 2)
        return low - index(self.lane) * 2 + index(self.whole)

    def _tile(self, half: Var, name: str) -> Var:
        """Return a name for the tile of both elements of pairs of which one is ``half``."""
        assert self.whole is not None
        return Var(self.names.new(name), half.dtype, half.axes - {self.lane} | {self.whole})

    def _loaded(self, *pair: Let) -> list[Statement]:
        if not pair:
            return []
        low, high = pair
        assert isinstance(low.value, Load)
        value = low.value
        both = Load(value.buffer, (self._both(value.indices[0]),), value.guard)
        tile = self._tile(low.var, f"{value.buffer.name}_pairs")
        return [Let(tile, both), Unzip((low.var, high.var), tile)]

    def _stored(self, *pair: Put) -> list[Statement]:
        if not pair:
            return []
        low, high = pair
        assert isinstance(low.value, Var) and isinstance(high.value, Var)
        offset = self._both(low.offset)
        tile = self._tile(low.value, f"{low.buffer.name}_pairs")
        both = Put(low.buffer, offset, tile, low.guard)
        return [Zip(tile, (low.value, high.value)), both]
