"""Equality up to names: two structures are equal up to names if their canonical forms are.

``canonical`` numbers buffers, axes and sizes in the order in which a walk meets them, and describes
the rest by these numbers: tuples of numbers and strings, the same in every process. Names, the
user's source lines and reasons are no part of it. The extent of an axis and the element type of a
buffer are recorded where it is first met; the layout of a buffer is not, because code may be the
same where layouts differ: a caller that needs it passes ``(x, layouts)``.

Worked example: ``y[i, j] = x[i, j] + b[j]`` and ``z[k, l] = y[k, l] + c[l]`` have one form, with
the leaves ``(y, i, j, b, x)`` and ``(z, k, l, c, y)``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from fusec.errors import InternalError
from fusec.ir.dtype import DType, NumberForm
from fusec.ir.expr import Buffer, Expr, Reduce, Var, postorder
from fusec.ir.graph import InputObject, NodeConstant
from fusec.ir.index import Axis, FloorDiv, Index, Mod, Runtime, Size
from fusec.ir.monoid import Monoid

Leaf: TypeAlias = Buffer | Axis | Size | InputObject | NodeConstant
_Leaf = TypeVar("_Leaf", Buffer, Axis, Size)

NAMES = frozenset({
    "name", "node", "origin", "source", "notation", "reason", "labels", "covers", "defs",
    "decomposition",
})  # fmt: skip
"""Fields that are no part of a form: names, origins, and redundant descriptions."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """A structure without its names, and the objects that had them.

    Attributes:
        form: equal for structures that are equal up to names.
        leaves: the objects behind the numbers in ``form``, by number: buffers, axes, sizes.
        nodes: the number of distinct nodes of its expressions.
    """

    form: tuple[object, ...]
    leaves: tuple[Leaf, ...]
    nodes: int

    def of_kind(self, kind: type[_Leaf]) -> tuple[_Leaf, ...]:
        """Return the leaves of one kind: buffers, axes or sizes."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, kind))


def common(parts: Sequence[Canonical]) -> tuple[object, ...]:
    """Return which leaves the structures share, and the order of their axes' serials.

    Groups of structures with equal forms are equal up to names if this is equal, too: terms of an
    index are sorted by serials.
    """
    leaves = [leaf for part in parts for leaf in part.leaves]
    numbers = {leaf: number for number, leaf in enumerate(dict.fromkeys(leaves))}
    axes = [leaf for leaf in numbers if isinstance(leaf, Axis)]
    order = sorted(range(len(axes)), key=lambda k: axes[k].serial)
    return (tuple(map(numbers.__getitem__, leaves)), tuple(order))


def canonical(*things: Any) -> Canonical:
    """Return the form of structures of the IR, or of tuples of them, with one numbering for all.

    Raises:
        InternalError: for an object of any other type.
    """
    walk = _Numbering()
    roots = tuple(map(walk.form, things))
    form = (roots, tuple(walk.rows), tuple(walk.described))
    return Canonical(form, tuple(walk.leaves), len(walk.rows))


class _Numbering:
    """The state of a walk: numbers of leaves and values, and their descriptions."""

    def __init__(self) -> None:
        self.leaves: dict[Leaf, int] = {}
        self.described: list[object] = []
        self.values: dict[Expr, int] = {}
        self.rows: list[tuple[object, ...]] = []

    def form(self, thing: Any) -> object:
        match thing:
            case Buffer() | Axis() | Size() | InputObject() | NodeConstant():
                return self.leaf(thing)
            case Index():
                return self.index(thing)
            case tuple():
                return tuple(map(self.form, thing))
            case None | bool() | int() | float() | str():
                return repr(thing)
            case DType() | NumberForm() | Monoid():
                return thing.name
            case _ if dataclasses.is_dataclass(thing):
                kind: Any = type(thing)
                return (kind.__name__, *[self.form(getattr(thing, f)) for f in _fields(kind)])
            case _:
                return self.value(thing)

    def leaf(self, thing: Leaf) -> int:
        """Return the number of a leaf; record its description when it is first met."""
        leaf = thing.base if isinstance(thing, Buffer) else thing
        number = self.leaves.get(leaf)
        if number is None:
            number = self.leaves[leaf] = len(self.leaves)
            self.described.append(None)
            self.described[number] = self.description(leaf)
        return number

    def description(self, leaf: Leaf) -> object:
        match leaf:
            case Buffer():
                return leaf.dtype.name
            case Axis():
                return (self.index(leaf.extent), leaf.limit and self.index(leaf.limit))
            case Size():
                return (leaf.least, leaf.most)
            case _:
                return None

    def value(self, root: Expr) -> int:
        """Return the number of an expression, with a row for each of its distinct nodes."""
        if root in self.values:
            return self.values[root]
        new = [node for node in postorder((root,)) if node not in self.values]
        for node in new:
            if isinstance(node, Reduce):  # axes' numbers must not depend on an index's order
                self.form(node.over)
        for node in new:
            if node not in self.values:
                row = self.row(node)
                self.values[node] = len(self.rows)
                self.rows.append(row)
        return self.values[root]

    def row(self, node: Expr) -> tuple[object, ...]:
        """Return the row of a node, whose children have rows already."""
        kind: Any = type(node)
        if isinstance(node, Var):
            lanes = sorted(node.axes, key=lambda axis: axis.serial)
            return ("Var", node.dtype.name, *map(self.leaf, lanes))
        parts = [self.form(getattr(node, f)) for f in kind.__slots__ if f != "gathers"]
        return (kind.__name__, node.dtype.name, *parts)

    def index(self, value: Index) -> object:
        if not value.terms:
            return value.const
        terms = [(tuple(sorted(map(self.atom, atoms), key=repr)), c) for atoms, c in value.terms]
        return (*sorted(terms, key=repr), value.const)  # not by serials

    def atom(self, atom: object) -> object:
        match atom:
            case Axis() | Size():
                return self.leaf(atom)
            case FloorDiv() | Mod():
                parts = (self.index(atom.dividend), self.index(atom.divisor))
                return (type(atom).__name__, *parts)
            case Runtime():
                return ("gather", self.value(atom.expr), self.index(atom.extent))
            case _:
                raise InternalError(atom, stage="ir.canonical")


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass that are part of a form."""
    return tuple(f.name for f in dataclasses.fields(kind) if f.name not in NAMES)
