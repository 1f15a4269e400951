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
from typing import TypeAlias

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

_Key: TypeAlias = tuple[Buffer, Index, Expr | None, frozenset[Axis]]
"""The buffer, offset and guard of an access, and the lanes of its value."""
_Waiting: TypeAlias = dict[_Key, Statement]
"""Accesses that may become one of a pair, all of them loads or all stores."""


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
        pairs = self._pairs(body)
        done: list[Statement] = []
        for statement in body:
            if isinstance(statement, For):
                done.append(replace(statement, body=self.block(statement.body)))
            else:
                done += self._joined(*pairs[statement]) if statement in pairs else (statement,)
        return tuple(done)

    def _pairs(self, body: tuple[Statement, ...]) -> dict[Statement, tuple[Statement, ...]]:
        """Return each access of a pair -> both, the lower first, where they are made; else ().

        That is where the first is loaded, or the second stored: no other access of their buffer,
        unless it is alike, is between them.
        """
        found: dict[Statement, tuple[Statement, ...]] = {}
        loads: _Waiting = {}
        stores: _Waiting = {}
        for statement in body:
            match statement:
                case Let(var=var, value=Load(buffer=buffer, indices=(offset,), guard=guard)):
                    pair = self._pair(statement, (buffer, offset, guard, var.axes), loads)
                    found |= {one: () if one is statement else pair for one in pair}
                    stores = self._apart(stores, buffer)
                case Put(buffer=buffer, offset=offset, value=Var(axes=axes), guard=guard):
                    pair = self._pair(statement, (buffer, offset, guard, axes), stores)
                    found |= {one: pair if one is statement else () for one in pair}
                    loads = self._apart(loads, buffer)
                case Put(buffer=buffer):
                    loads = self._apart(loads, buffer)
                case For():
                    loads, stores = {}, {}
                case Update():
                    stores = {}
        return found

    def _pair(self, access: Statement, key: _Key, waiting: _Waiting) -> tuple[Statement, ...]:
        """Return a pair, the lower first, if the other access waits for this one; else this waits.

        Returns:
            () for no pair.
        """
        buffer, offset, guard, axes = key
        which = self._which(buffer, offset, guard)
        if which is None or self.lane not in axes:
            return ()
        other = waiting.pop((buffer, offset + (1 - 2 * which), guard, axes), None)
        if other is None:
            waiting[key] = access
            return ()
        return (other, access) if which else (access, other)

    def _apart(self, waiting: _Waiting, buffer: Buffer) -> _Waiting:
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

    def _joined(self, *pair: Statement) -> list[Statement]:
        """Return the statements that load or store a pair; none for ()."""
        match pair:
            case (Let(value=Load() as load) as low, Let() as high):
                both = Load(load.buffer, (self._both(load.indices[0]),), load.guard)
                tile = self._tile(low.var, f"{load.buffer.name}_pairs")
                return [Let(tile, both), Unzip((low.var, high.var), tile)]
            case (Put(value=Var() as even) as low, Put(value=Var() as odd)):
                offset = self._both(low.offset)
                tile = self._tile(even, f"{low.buffer.name}_pairs")
                return [Zip(tile, (even, odd)), Put(low.buffer, offset, tile, low.guard)]
            case _:
                return []
