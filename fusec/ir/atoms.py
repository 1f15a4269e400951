"""The atoms of indices: axes, symbolic sizes, divisions, and values read from memory.

Axes compare by identity; the others are interned. ``index.py`` makes sums of their products, and
owns the grammar.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from fusec.errors import InternalError
from fusec.ir.intern import Node

if TYPE_CHECKING:
    from fusec.ir.index import Index

_serial = itertools.count()

MAX_SIZE = 2**31 - 2**20
"""The greatest symbolic size that a kernel takes: an index below it plus a tile fits 32 bits."""


class Axis:
    """An iteration axis: ``0 <= axis < extent``, and ``< limit`` where a ragged split set one.

    Compared by identity: two axes of the same name never clash.
    """

    __slots__ = ("__weakref__", "as_index", "axes", "extent", "limit", "name", "serial")

    def __init__(self, name: str, extent: Index, limit: Index | None = None) -> None:
        self.name = name
        self.extent = extent
        self.limit = limit
        self.serial = next(_serial)
        self.as_index: Index | None = None  # cached by `index`
        self.axes: frozenset[Axis] = frozenset((self,))

    def __repr__(self) -> str:
        return self.name


class Size(Node):
    """A symbolic integer, known at launch.

    Attributes:
        hint: the value seen while tracing.
        least: the lower bound; None where there is none, as for an integer argument.
        most: the upper bound; None where it is not known.
        bounds: sums of other sizes that are upper bounds.
    """

    __slots__ = ("bounds", "hint", "least", "most", "name")

    def __init__(
        self,
        name: str,
        hint: int,
        least: int | None = 1,
        most: int | None = None,
        bounds: tuple[Index, ...] = (),
    ) -> None:
        self.name = name
        self.hint = hint
        self.least = least
        self.most = most
        self.bounds = bounds

    @classmethod
    def intern_key(cls, *fields: Any) -> tuple[Any, ...]:
        return (*fields, *(1, None, ())[len(fields) - 2 :]) if len(fields) < 5 else fields

    @property
    def serial(self) -> str:
        return self.name

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset()

    def __repr__(self) -> str:
        return self.name


def size_class(hint: int) -> int:
    """Return the least power of two >= ``hint``: sizes of one class share verdicts of races."""
    return 1 << max(hint - 1, 0).bit_length()


class Minimum(Size):
    """The minimum of two sums of sizes, computed once, before its first use.

    There is no maximum: that of a and b is ``a + b`` minus their minimum.
    """

    __slots__ = ("args",)

    def __init__(
        self, name: str, hint: int, least: int | None, most: int | None, args: tuple[Index, ...]
    ) -> None:
        super().__init__(name, hint, least, most, args)
        self.args = args


class _Division(Node):
    """A quotient or remainder; ``depth`` counts it and the divisions nested in its dividend."""

    __slots__ = ("axes", "depth", "dividend", "divisor", "serial")
    axes: frozenset[Axis]

    def __init__(self, dividend: Index, divisor: Index) -> None:
        self.dividend = dividend
        self.divisor = divisor
        self.axes = dividend.axes | divisor.axes
        inner = (a.depth for m, _ in dividend.terms for a in m if isinstance(a, _Division))
        self.depth: int = 1 + max(inner, default=0)
        self.serial = next(_serial)


class FloorDiv(_Division):
    """``dividend // divisor``, rounded down; both are ``Index``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"({self.dividend})//({self.divisor})"


class Quotient(FloorDiv):
    """The exact quotient of sizes, an atom of their normal form: equal sizes are equal sums.

    Where n divides a size s, the frontend's ``SizeMap`` writes ``n * Quotient(s, n)`` for s
    everywhere. Where n divides another sum, such as ``2*s``, ``n * Quotient(2*s, n)`` is ``2*s``.

    Attributes:
        cancels: the product n with which it is its dividend; () where that is a size.
    """

    __slots__ = ("cancels",)

    def __init__(self, dividend: Index, divisor: Index) -> None:
        super().__init__(dividend, divisor)
        self.cancels: Monomial = ()
        if dividend.as_size() is None:
            ((self.cancels, times),) = divisor.terms
            if times != 1 or divisor.const:
                raise InternalError(divisor, stage="ir.atoms")


class Mod(_Division):
    """``dividend % divisor``, with the sign of the divisor; both are ``Index``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"({self.dividend})%({self.divisor})"


class Runtime(Node):
    """An index that is read from memory (a gather): the value of ``expr``, in ``[0, extent)``."""

    __slots__ = ("axes", "expr", "extent", "serial")

    def __init__(self, expr: Any, extent: Index) -> None:
        self.expr = expr
        self.extent = extent
        self.axes = expr.axes
        self.serial = next(_serial)

    def __repr__(self) -> str:
        return f"[{self.expr}]"


Atom: TypeAlias = Axis | Size | FloorDiv | Mod | Runtime
Monomial: TypeAlias = tuple[Atom, ...]
IntoIndex: TypeAlias = Union["Index", Axis, Size, FloorDiv, Mod, Runtime, int]


@functools.lru_cache(maxsize=1 << 14)
def atom_order(atom: Atom) -> tuple[str, str]:
    """Return the key by which the factors of a product are sorted."""
    return (type(atom).__name__, str(atom.serial).zfill(12))


@functools.lru_cache(maxsize=1 << 14)
def monomial_order(monomial: Monomial) -> tuple[tuple[str, str], ...]:
    """Return the key by which the terms of a sum are sorted."""
    return tuple(map(atom_order, monomial))


def divided(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """Return the quotient of two products, or None if ``monomial`` is no multiple."""
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def canceled(monomial: Monomial) -> tuple[Index, Monomial] | None:
    """Return the dividend of a quotient that has its divisor beside it, and the other factors."""
    for atom in monomial:
        if isinstance(atom, Quotient) and atom.cancels:
            left = divided(without(monomial, atom), atom.cancels)
            if left is not None:
                return atom.dividend, left
    return None


def without(monomial: Monomial, atom: Atom) -> Monomial:
    """Return the product with one occurrence of ``atom`` left out."""
    position = monomial.index(atom)
    return monomial[:position] + monomial[position + 1 :]
