"""What indices are made of: axes, symbolic sizes, divisions, and values read from memory.

Axes compare by identity; the others are interned. ``index.py`` makes sums of their products, and
owns the grammar.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from fusec.ir.intern import Node

if TYPE_CHECKING:
    from fusec.ir.index import Index

_serial = itertools.count()


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
        self.as_index: Index | None = None  # made and kept by `index`
        self.axes: frozenset[Axis] = frozenset((self,))

    def __repr__(self) -> str:
        return self.name


class Size(Node):
    """A symbolic integer, known at launch.

    Attributes:
        hint: the value seen while tracing.
        least: no value is less; None where any may be, as of an integer argument.
        most: no value is more; None where that is not known.
        bounds: sums of other sizes that it is never above.
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
    """Return the least power of two that holds a size: sizes of one class share what was timed."""
    return 1 << max(hint - 1, 0).bit_length()


class Minimum(Size):
    """The least of two sums of sizes, computed once, before what has it as a size.

    There is no maximum: that of a and b is ``a + b`` without their minimum.
    """

    __slots__ = ("args",)

    def __init__(
        self,
        name: str,
        hint: int,
        least: int | None,
        most: int | None,
        args: tuple[Index, ...],
    ) -> None:
        super().__init__(name, hint, least, most, args)
        self.args = args


class _Division(Node):
    """A quotient or remainder; ``depth`` of them are one inside the other."""

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
    """A size that is known to be divided without remainder, one of the atoms of a normal form.

    Where n divides a size s, s is written ``n * Quotient(s, n)`` wherever it stands (``Sizes`` of
    the frontend does so), so that equal sizes are equal sums.
    """

    __slots__ = ()


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
    """Return what the factors of a product are sorted by."""
    return (type(atom).__name__, str(atom.serial).zfill(12))


@functools.lru_cache(maxsize=1 << 14)
def monomial_order(monomial: Monomial) -> tuple[tuple[str, str], ...]:
    """Return what the terms of a sum are sorted by."""
    return tuple(map(atom_order, monomial))


def divided(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """Return the product over another one, None if it is no multiple."""
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def without(monomial: Monomial, atom: Atom) -> Monomial:
    """Return the product with one occurrence of ``atom`` left out."""
    position = monomial.index(atom)
    return monomial[:position] + monomial[position + 1 :]
