"""Integer index expressions over axes and symbolic sizes, in one canonical form.

Grammar of the printed form::

    index    ::= term (('+' | '-') term)*
    term     ::= [integer '*'] atom ('*' atom)*  |  integer
    atom     ::= axis | size | '(' index ')//(' index ')' | '(' index ')%(' index ')' | '[' expr ']'

An ``Index`` is a sum of integer multiples of products of atoms, plus a constant. The form is
canonical: equal sums are the same object. Division and remainder are simplified by bounds,
``(a*n + b)//n -> a`` and ``(a*n + b)%n -> b`` where ``0 <= b < n``. All sizes are at least 1: a graph
with a zero-size tensor never reaches this IR with symbols.

Worked example: with ``b < B``, ``t < 8``, ``m = b*8 + t``: ``m//8`` is ``b`` and ``m%8`` is ``t``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, Union

from fusec.ir.intern import Node

_serial = itertools.count()


class Axis:
    """An iteration axis: ``0 <= axis < extent``, and ``< limit`` where a ragged split set one.

    Compared by identity: two axes of the same name never clash.
    """

    __slots__ = ("__weakref__", "extent", "limit", "name", "serial")

    def __init__(self, name: str, extent: Index, limit: Index | None = None) -> None:
        self.name = name
        self.extent = extent
        self.limit = limit
        self.serial = next(_serial)

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset((self,))

    def __repr__(self) -> str:
        return self.name


class Size(Node):
    """A symbolic extent, known at launch: at least 1. ``hint`` is the size seen while tracing."""

    __slots__ = ("hint", "name")

    def __init__(self, name: str, hint: int) -> None:
        self.name = name
        self.hint = hint

    @classmethod
    def intern_key(cls, *fields: Any) -> tuple[Any, ...]:
        return fields

    @property
    def serial(self) -> str:
        return self.name

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset()

    def __repr__(self) -> str:
        return self.name


class FloorDiv(Node):
    """``dividend // divisor``, rounded down; both are ``Index``."""

    __slots__ = ("axes", "dividend", "divisor", "serial")
    axes: frozenset[Axis]

    def __init__(self, dividend: Index, divisor: Index) -> None:
        self.dividend = dividend
        self.divisor = divisor
        self.axes = dividend.axes | divisor.axes
        self.serial = next(_serial)

    def __repr__(self) -> str:
        return f"({self.dividend})//({self.divisor})"


class Mod(Node):
    """``dividend % divisor``, with the sign of the divisor; both are ``Index``."""

    __slots__ = ("axes", "dividend", "divisor", "serial")
    axes: frozenset[Axis]

    def __init__(self, dividend: Index, divisor: Index) -> None:
        self.dividend = dividend
        self.divisor = divisor
        self.axes = dividend.axes | divisor.axes
        self.serial = next(_serial)

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


Atom: TypeAlias = Union[Axis, Size, FloorDiv, Mod, Runtime]
Monomial: TypeAlias = tuple[Atom, ...]
IntoIndex: TypeAlias = Union["Index", Axis, Size, FloorDiv, Mod, Runtime, int]


def _atom_order(atom: Atom) -> tuple[str, str]:
    return (type(atom).__name__, str(atom.serial).zfill(12))


class Index(Node):
    """A canonical sum ``const + sum(coefficient * product of atoms)``; build with ``index(...)``."""

    __slots__ = ("axes", "const", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...], const: int) -> None:
        self.terms = terms
        self.const = const
        axes: frozenset[Axis] = frozenset()
        for monomial, _ in terms:
            for atom in monomial:
                axes |= atom.axes
        self.axes = axes

    # -- arithmetic -------------------------------------------------------------------------------

    def __add__(self, other: IntoIndex) -> Index:
        other = index(other)
        if not other.terms:
            return Index(self.terms, self.const + other.const) if other.const else self
        return _sum((*self.terms, *other.terms), self.const + other.const)

    def __sub__(self, other: IntoIndex) -> Index:
        return self + index(other) * -1

    def __mul__(self, other: IntoIndex) -> Index:
        other = index(other)
        if not other.terms:
            if other.const == 1:
                return self
            scaled = (
                tuple((m, c * other.const) for m, c in self.terms)
                if other.const
                else ()
            )
            return Index(scaled, self.const * other.const)
        if not self.terms:
            return other * self.const
        products = [
            (tuple(sorted(m1 + m2, key=_atom_order)), c1 * c2)
            for m1, c1 in (*self.terms, *(((), self.const),))
            for m2, c2 in (*other.terms, *(((), other.const),))
        ]
        return _sum(products, 0)

    def __neg__(self) -> Index:
        return self * -1

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: IntoIndex) -> Index:
        return index(other) - self

    def __floordiv__(self, other: IntoIndex) -> Index:
        return floordiv(self, index(other))

    def __mod__(self, other: IntoIndex) -> Index:
        return mod(self, index(other))

    # -- questions --------------------------------------------------------------------------------

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def as_axis(self) -> Axis | None:
        """Return the axis if this index is exactly one axis, else None."""
        if self.const == 0 and len(self.terms) == 1:
            monomial, coefficient = self.terms[0]
            if (
                coefficient == 1
                and len(monomial) == 1
                and isinstance(monomial[0], Axis)
            ):
                return monomial[0]
        return None

    def coefficient(self, axis: Axis) -> Index | None:
        """Return k where the index is ``k*axis + rest`` and neither k nor rest has the axis, else None."""
        factor: list[tuple[Monomial, int]] = []
        const = 0
        for monomial, coefficient in self.terms:
            if not any(axis in atom.axes for atom in monomial):
                continue
            if monomial.count(axis) != 1 or any(
                axis in atom.axes for atom in monomial if atom is not axis
            ):
                return None
            rest = tuple(atom for atom in monomial if atom is not axis)
            if rest:
                factor.append((rest, coefficient))
            else:
                const += coefficient
        return _sum(factor, const)

    def hint(self) -> int:
        """Return the value with each size at its hint and each axis at 0."""
        total = self.const
        for monomial, coefficient in self.terms:
            product = coefficient
            for atom in monomial:
                match atom:
                    case Size():
                        product *= atom.hint
                    case FloorDiv():
                        product *= atom.dividend.hint() // max(atom.divisor.hint(), 1)
                    case Mod():
                        product *= atom.dividend.hint() % max(atom.divisor.hint(), 1)
                    case _:
                        product = 0
            total += product
        return total

    def __repr__(self) -> str:
        return _print(self)


def index(value: IntoIndex) -> Index:
    """Return ``value`` as an ``Index``."""
    if isinstance(value, Index):
        return value
    if isinstance(value, int):
        return Index((), int(value))
    return Index((((value,), 1),), 0)


def _sum(terms: Iterable[tuple[Monomial, int]], const: int) -> Index:
    merged: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        if not monomial:
            const += coefficient
        else:
            merged[monomial] = merged.get(monomial, 0) + coefficient
    const += _rejoin_divisions(merged)
    kept = [(m, c) for m, c in merged.items() if c]
    kept.sort(key=lambda term: tuple(map(_atom_order, term[0])))
    return Index(tuple(kept), const)


def _rejoin_divisions(merged: dict[Monomial, int]) -> int:
    """Rewrite ``k*n*(x//n) + k*(x%n)`` to ``k*x``, for a constant n: what a reshape and its inverse give.

    Changes ``merged`` and returns what is to be added to the constant.
    """
    const = 0
    for monomial, coefficient in list(merged.items()):
        atom = monomial[0]
        if (
            len(monomial) != 1
            or not isinstance(atom, Mod)
            or not atom.divisor.is_constant
        ):
            continue
        quotient_index = floordiv(atom.dividend, atom.divisor)
        if len(quotient_index.terms) != 1 or quotient_index.const:
            continue
        quotient, unit = quotient_index.terms[0]
        scale = coefficient * atom.divisor.const
        if (
            unit == 1
            and merged.get(quotient) == scale != 0
            and merged.get(monomial) == coefficient
        ):
            del merged[quotient], merged[monomial]
            for inner, c in atom.dividend.terms:
                merged[inner] = merged.get(inner, 0) + c * coefficient
            const += atom.dividend.const * coefficient
    return const


def floordiv(a: Index, b: Index) -> Index:
    """Return ``a // b``, simplified where bounds prove it."""
    quotient, remainder = _divide_terms(a, b)
    if quotient is not None:
        if is_in_range(remainder, b):
            return quotient
        if quotient.terms or quotient.const:
            return quotient + floordiv(remainder, b)
    if a.is_constant and b.is_constant and b.const:
        return index(a.const // b.const)
    if is_in_range(a, b):
        return index(0)
    if len(a.terms) == 1 and not a.const and b.is_constant:
        monomial, c = a.terms[0]
        inner = monomial[0]
        if (
            c == 1
            and len(monomial) == 1
            and isinstance(inner, FloorDiv)
            and inner.divisor.is_constant
        ):
            return floordiv(inner.dividend, inner.divisor * b)
    return index(FloorDiv(a, b))


def mod(a: Index, b: Index) -> Index:
    """Return ``a % b``, simplified where bounds prove it."""
    quotient, remainder = _divide_terms(a, b)
    if quotient is not None and (quotient.terms or quotient.const):
        return mod(remainder, b)
    if a.is_constant and b.is_constant and b.const:
        return index(a.const % b.const)
    if is_in_range(a, b):
        return a
    if a.const:  # keep rejoinable: no constant inside a Mod that has one of its own
        return a - b * floordiv(a, b)
    return index(Mod(a, b))


def _divide_terms(a: Index, b: Index) -> tuple[Index | None, Index]:
    """Split a into ``q*b + r`` term by term, for a single-term or constant b."""
    if b.is_constant:
        n = b.const
        if n == 0:
            return None, a
        divisible = tuple((m, c // n) for m, c in a.terms if c % n == 0)
        rest = tuple((m, c) for m, c in a.terms if c % n)
        return Index(divisible, a.const // n), Index(rest, a.const % n)
    if len(b.terms) != 1 or b.const:
        return (index(1), index(0)) if a is b else (None, a)
    divisor, n = b.terms[0]
    quotient: list[tuple[Monomial, int]] = []
    rest_terms: list[tuple[Monomial, int]] = []
    for monomial, c in a.terms:
        left = list(monomial)
        fits = c % n == 0
        for atom in divisor:
            if atom in left:
                left.remove(atom)
            else:
                fits = False
        if fits:
            quotient.append((tuple(left), c // n))
        else:
            rest_terms.append((monomial, c))
    return _sum(quotient, 0), _sum(rest_terms, a.const)


def is_in_range(value: Index, extent: Index) -> bool:
    """Return True if ``0 <= value < extent`` is provable from the domains of its axes."""
    return is_nonnegative(value) and is_nonnegative(extent - 1 - value)


def is_nonnegative(value: Index) -> bool:
    """Return True if ``value >= 0`` is provable: axes in their domains, sizes at least 1."""
    low = _least(value)
    if low is None:
        return False
    return _sizes_nonnegative(low)


def _least(value: Index) -> Index | None:
    """Replace each axis by the end of its domain that makes the sum least; None where unknown."""
    for _ in range(8):
        axis = next((x for m, _ in value.terms for x in m if isinstance(x, Axis)), None)
        if axis is None:
            break
        k = value.coefficient(axis)
        if k is None:
            return None
        rest = value - k * index(axis)
        if _sizes_nonnegative(k):
            value = rest
        elif _sizes_nonnegative(-k):
            last = axis.extent - 1
            ragged = (
                rest + k * (axis.limit - 1) if axis.limit is not None else None
            )  # min(extent, limit) - 1: either bound is sound
            if ragged is not None:
                tight = _least(ragged)
                if tight is not None and _sizes_nonnegative(tight):
                    return tight
            value = rest + k * last
        else:
            return None
    if any(isinstance(x, Axis) for m, _ in value.terms for x in m):
        return None
    total = index(value.const)
    for monomial, coefficient in value.terms:
        bounded = _bound_atoms(monomial, coefficient)
        if bounded is None:
            return None
        total = total + bounded
    return total


def _bound_atoms(monomial: Monomial, coefficient: int) -> Index | None:
    """Return the least value of ``coefficient * monomial`` over its division and gather atoms."""
    product = index(coefficient)
    for atom in monomial:
        match atom:
            case Size():
                product = product * index(atom)
            case Mod() if len(monomial) == 1:
                product = index(0) if coefficient > 0 else product * (atom.divisor - 1)
            case Runtime() if len(monomial) == 1:
                product = index(0) if coefficient > 0 else product * (atom.extent - 1)
            case FloorDiv() if atom.divisor.is_constant and atom.divisor.const > 0:
                if coefficient > 0:
                    return index(0) if is_nonnegative(atom.dividend) else None
                most = _most(atom.dividend)
                if most is None or not most.is_constant or len(monomial) != 1:
                    return None
                product = index(coefficient * (most.const // atom.divisor.const))
            case _:
                if atom.axes:
                    return None
                product = product * index(atom)
    return product


def _most(value: Index) -> Index | None:
    low = _least(-value)
    return None if low is None else -low


def most(value: Index) -> int | None:
    """Return the greatest value as an integer where it is a known constant, else None."""
    high = _most(value)
    return high.const if high is not None and high.is_constant else None


def least(value: Index) -> int | None:
    """Return the least value as an integer where it is a known constant, else None."""
    low = _least(value)
    return low.const if low is not None and low.is_constant else None


def _sizes_nonnegative(value: Index) -> bool:
    """Prove ``value >= 0`` for a polynomial in sizes >= 1: positive terms must outweigh at size 1."""
    total = value.const
    for monomial, coefficient in value.terms:
        if not all(isinstance(atom, Size) for atom in monomial):
            if coefficient < 0 or not all(_atom_nonnegative(atom) for atom in monomial):
                return False
            continue
        if coefficient < 0:
            dominated = _dominating(value, monomial, -coefficient)
            if not dominated:
                return False
            continue
        total += coefficient
    spent = sum(-c for _, c in value.terms if c < 0)
    return total - spent >= 0


def _dominating(value: Index, monomial: Monomial, amount: int) -> bool:
    """True if a positive term with all atoms of ``monomial`` has at least this coefficient."""
    for other, coefficient in value.terms:
        left = list(other)
        if coefficient < amount:
            continue
        for atom in monomial:
            if atom not in left:
                break
            left.remove(atom)
        else:
            return True
    return False


def _atom_nonnegative(atom: Atom) -> bool:
    match atom:
        case Axis() | Size() | Mod() | Runtime():
            return True
        case FloorDiv():
            return is_nonnegative(atom.dividend) and is_nonnegative(atom.divisor)


def substitute(value: Index, mapping: Mapping[Axis, Index]) -> Index:
    """Return ``value`` with axes replaced; division atoms are rebuilt and simplified."""
    if not value.axes or value.axes.isdisjoint(mapping):
        return value
    total = index(value.const)
    for monomial, coefficient in value.terms:
        product = index(coefficient)
        for atom in monomial:
            product = product * _substitute_atom(atom, mapping)
        total = total + product
    return total


def _substitute_atom(atom: Atom, mapping: Mapping[Axis, Index]) -> Index:
    match atom:
        case Axis():
            return mapping.get(atom) or index(atom)
        case FloorDiv():
            return floordiv(
                substitute(atom.dividend, mapping), substitute(atom.divisor, mapping)
            )
        case Mod():
            return mod(
                substitute(atom.dividend, mapping), substitute(atom.divisor, mapping)
            )
        case Runtime():
            return index(Runtime(atom.expr.substitute(mapping), atom.extent))
        case _:
            return index(atom)


def product(values: Iterable[IntoIndex]) -> Index:
    """Return the product of indices (of extents: the number of elements)."""
    total = index(1)
    for value in values:
        total = total * index(value)
    return total


def contiguous_strides(shape: tuple[Index, ...]) -> tuple[Index, ...]:
    """Return row-major strides of ``shape``, in elements."""
    strides: list[Index] = []
    step = index(1)
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))


def _print(value: Index) -> str:
    parts: list[str] = []
    for monomial, coefficient in value.terms:
        body = "*".join(repr(atom) for atom in monomial)
        if coefficient == 1:
            parts.append(f"+ {body}")
        elif coefficient == -1:
            parts.append(f"- {body}")
        else:
            parts.append(f"{'-' if coefficient < 0 else '+'} {abs(coefficient)}*{body}")
    if value.const or not parts:
        parts.append(f"{'-' if value.const < 0 else '+'} {abs(value.const)}")
    text = " ".join(parts)
    return text[2:] if text.startswith("+ ") else "-" + text[2:]
