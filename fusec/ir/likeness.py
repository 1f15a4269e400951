"""Definitions that are alike: the same but for their buffers and axes.

The layers of a deep model repeat the same definitions over other buffers. What depends on nothing
else, a price or a rejection, is found for one group of definitions and holds for all that are
alike.

Worked example: ``y[i, j] = x[i, j] + b[j]`` and ``z[k, l] = y[k, l] + c[l]`` have one form if x and
y, b and c are stored in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    postorder,
)
from fusec.ir.graph import Def
from fusec.ir.index import Axis, FloorDiv, Index, Mod

_Thing = TypeVar("_Thing", Buffer, Axis)


@dataclass(frozen=True, slots=True)
class Likeness:
    """A definition without its buffers and axes, and these in the order of their appearance.

    Attributes:
        form: equal for definitions that are alike.
        nodes: how many operations, loads and so on the definition has.
    """

    form: tuple[object, ...]
    buffers: tuple[Buffer, ...]
    axes: tuple[Axis, ...]
    nodes: int


def likeness(line: Def) -> Likeness:
    """Return what a definition has in common with others that are alike."""
    return _Describer().describe(line)


class _Describer:
    def __init__(self) -> None:
        self.buffers: dict[Buffer, int] = {}
        self.axes: dict[Axis, int] = {}
        self.number: dict[Expr, int] = {}

    def describe(self, line: Def) -> Likeness:
        head = (self._buffer(line.buffer), tuple(map(self._axis, line.axes)))
        for node in postorder((line.expr,)):
            self.number[node] = len(self.number)
        rows = tuple(map(self._row, self.number))
        layouts = tuple((b.shape, b.strides, b.dtype) for b in self.buffers)
        ends = tuple(self._ends())
        count = len(self.number)
        return Likeness((head, rows, layouts, ends), tuple(self.buffers), tuple(self.axes), count)

    def _ends(self) -> list[tuple[object, ...]]:
        """Return name, extent and limit of each axis; a limit may mention others."""
        found: list[tuple[object, ...]] = []
        while len(found) < len(self.axes):
            axis = list(self.axes)[len(found)]
            limit = None if axis.limit is None else self._index(axis.limit)
            found.append((axis.name, axis.extent, limit))
        return found

    def _buffer(self, buffer: Buffer) -> int:
        return self.buffers.setdefault(buffer, len(self.buffers))

    def _axis(self, axis: Axis) -> int:
        return self.axes.setdefault(axis, len(self.axes))

    def _row(self, node: Expr) -> tuple[object, ...]:
        match node:
            case Op():
                return (node.name, *(self.number[a] for a in node.args))
            case Cast():
                return ("cast", node.dtype, self.number[node.arg])
            case Select():
                parts = (node.condition, node.then, node.other)
                return ("select", *(self.number[p] for p in parts))
            case Reduce():
                over = tuple(map(self._axis, node.over))
                return ("reduce", node.monoid.name, over, self.number[node.body])
            case Load():
                guard = None if node.guard is None else self.number[node.guard]
                where = tuple(map(self._index, node.indices))
                return ("load", self._buffer(node.buffer), where, guard)
            case IndexValue():
                return ("index", self._index(node.index), node.dtype)
            case Const():
                return ("const", repr(node.value), node.dtype)
            case _:
                return (node,)

    def _index(self, value: Index) -> tuple[object, ...]:
        terms = tuple((tuple(map(self._atom, m)), c) for m, c in value.terms)
        return (*terms, value.const)

    def _atom(self, atom: object) -> object:
        match atom:
            case Axis():
                return self._axis(atom)
            case FloorDiv():
                return ("//", self._index(atom.dividend), self._index(atom.divisor))
            case Mod():
                return ("%", self._index(atom.dividend), self._index(atom.divisor))
            case _:
                return atom  # a size; or a gather, which is like itself alone


def in_group(lines: list[Likeness], forms: dict[tuple[object, ...], int]) -> tuple[object, ...]:
    """Return what groups of definitions have in common that are alike, member by member.

    That they share the same buffers and axes is part of it, and the order of their axes' serials,
    by which terms of an index are sorted.

    Args:
        forms: numbers the forms that were seen; changed.
    """
    buffers = _numbers([b for line in lines for b in line.buffers])
    axes = [a for line in lines for a in line.axes]
    distinct = list(dict.fromkeys(axes))
    order = sorted(range(len(distinct)), key=lambda k: distinct[k].serial)
    kinds = tuple(forms.setdefault(line.form, len(forms)) for line in lines)
    return (kinds, buffers, _numbers(axes), tuple(order))


def _numbers(things: list[_Thing]) -> tuple[int, ...]:
    found: dict[_Thing, int] = {}
    return tuple(found.setdefault(thing, len(found)) for thing in things)
