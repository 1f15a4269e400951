"""Integer index expressions over axes and symbolic sizes, in one canonical form.

Grammar of the printed form::

    index    ::= term (('+' | '-') term)*
    term     ::= [integer '*'] atom ('*' atom)*  |  integer
    atom     ::= axis | size | '(' index ')//(' index ')' | '(' index ')%(' index ')' | '[' expr ']'

An ``Index`` is a sum of integer multiples of products of atoms, plus a constant. The form is
canonical: equal sums are the same object. Division and remainder are simplified by bounds,
``(a*n + b)//n -> a`` and ``(a*n + b)%n -> b`` where ``0 <= b < n``.

Worked example: with ``b < B``, ``t < 8``, ``m = b*8 + t``: ``m//8`` is ``b`` and ``m%8`` is ``t``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeGuard, TypeVar

from fusec.ir.atoms import (
    Atom,
    Axis,
    FloorDiv,
    IntoIndex,
    Mod,
    Monomial,
    Quotient,
    Runtime,
    Size,
    atom_order,
    canceled,
    divided,
    monomial_order,
    without,
)
from fusec.ir.bounds import holds_by_bounds
from fusec.ir.intern import Node
from fusec.ir.polynomial import common_factors, shifted, with_outer_divisions

_NO_AXES: frozenset[Axis] = frozenset()
_Value = TypeVar("_Value", int, float, "Index")


class Index(Node):
    """A canonical sum ``const + sum(coefficient * product of atoms)``; made by ``index(...)``."""

    __slots__ = ("axes", "const", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...], const: int) -> None:
        self.terms = terms
        self.const = const
        of_atoms = [atom.axes for monomial, _ in terms for atom in monomial]
        self.axes = of_atoms[0].union(*of_atoms[1:]) if of_atoms else _NO_AXES

    # -- arithmetic -------------------------------------------------------------------------------

    def __add__(self, other: IntoIndex) -> Index:
        other = other if isinstance(other, Index) else index(other)
        if not other.terms:
            return Index(self.terms, self.const + other.const) if other.const else self
        if not self.terms:
            return Index(other.terms, self.const + other.const) if self.const else other
        return sum_of_terms((*self.terms, *other.terms), self.const + other.const)

    def __sub__(self, other: IntoIndex) -> Index:
        other = other if isinstance(other, Index) else index(other)
        taken = [(m, -c) for m, c in other.terms]
        return sum_of_terms((*self.terms, *taken), self.const - other.const)

    def __mul__(self, other: IntoIndex) -> Index:
        other = other if isinstance(other, Index) else index(other)
        if not other.terms:
            if other.const == 1:
                return self
            scaled = tuple((m, c * other.const) for m, c in self.terms) if other.const else ()
            return Index(scaled, self.const * other.const)
        if not self.terms:
            return other * self.const
        products = [
            term
            for m1, c1 in (*self.terms, *(((), self.const),))
            for m2, c2 in (*other.terms, *(((), other.const),))
            for term in _reduced(tuple(sorted(m1 + m2, key=atom_order)), c1 * c2)
        ]
        return sum_of_terms(products, 0)

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

    # -- queries ----------------------------------------------------------------------------------

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def as_axis(self) -> Axis | None:
        """Return the axis if this index is exactly one axis, else None."""
        atom = self._atom()
        return atom if isinstance(atom, Axis) else None

    def as_size(self) -> Size | None:
        """Return the size if this index is exactly one size, else None."""
        atom = self._atom()
        return atom if isinstance(atom, Size) else None

    def _atom(self) -> object:
        if self.const == 0 and len(self.terms) == 1:
            monomial, coefficient = self.terms[0]
            if coefficient == 1 and len(monomial) == 1:
                return monomial[0]
        return None

    def coefficient(self, axis: Axis) -> Index | None:
        """Return k where this is ``k*axis + rest`` and neither k nor rest has the axis, or None."""
        return _coefficient(self, axis) if axis in self.axes else _SMALL[0]

    def steps_by_one(self, axis: Axis) -> bool:
        """Return True if this index, as an offset, has stride 1 along an axis."""
        return self.coefficient(axis) is index(1)

    def atoms(self) -> Iterator[Atom]:
        """Yield the atoms of all products, including those inside divisions."""
        for monomial, _ in self.terms:
            for atom in monomial:
                yield atom
                if isinstance(atom, FloorDiv | Mod):
                    yield from atom.dividend.atoms()
                    yield from atom.divisor.atoms()

    def hint(self) -> int:
        """Return the value with each size at its hint and each axis at 0."""
        return self.evaluate(_hint)

    def evaluate(self, of: Callable[[Atom], _Value]) -> _Value | int:
        """Return the sum with ``of(atom)`` in the place of each atom: a number, or an index."""
        return self.const + sum(k * math.prod(map(of, atoms)) for atoms, k in self.terms)

    def __repr__(self) -> str:
        from fusec.ir.text import print_index  # local: text imports this module

        return print_index(self)


def _hint(atom: Atom) -> int:
    match atom:
        case Size():
            return atom.hint
        case FloorDiv():
            return atom.dividend.hint() // (atom.divisor.hint() or 1)
        case Mod():
            return atom.dividend.hint() % (atom.divisor.hint() or 1)
        case _:
            return 0


def index(value: IntoIndex) -> Index:
    """Return ``value`` as an ``Index``."""
    if isinstance(value, Index):
        return value
    if isinstance(value, int):
        return _SMALL[value] if 0 <= value < len(_SMALL) else Index((), int(value))
    if isinstance(value, Axis):
        if value.as_index is None:
            value.as_index = Index((((value,), 1),), 0)
        return value.as_index
    return Index((((value,), 1),), 0)


@functools.lru_cache(maxsize=1 << 14)
def _coefficient(value: Index, axis: Axis) -> Index | None:
    factors: list[tuple[Monomial, int]] = []
    for monomial, coefficient in value.terms:
        holding = [atom for atom in monomial if axis in atom.axes]
        if holding == [axis]:
            factors.append((without(monomial, axis), coefficient))
        elif holding:
            return None
    return sum_of_terms(factors, 0)


def _reduced(monomial: Monomial, coefficient: int) -> tuple[tuple[Monomial, int], ...]:
    """Return a product as terms, with the dividend for a ``Quotient`` and its divisor."""
    if (found := canceled(monomial)) is None:
        return ((monomial, coefficient),)
    whole = found[0] * sum_of_terms([(found[1], coefficient)], 0)
    return (*whole.terms, ((), whole.const))


def sum_of_terms(terms: Iterable[tuple[Monomial, int]], const: int) -> Index:
    """Return the sum of multiples of products of atoms, in any order, and a constant."""
    merged: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        if not monomial:
            const += coefficient
        else:
            merged[monomial] = merged.get(monomial, 0) + coefficient
    if [atom for monomial in merged for atom in monomial if isinstance(atom, Mod)]:
        const += _rejoin_divisions(merged)
    kept = [(m, c) for m, c in merged.items() if c]
    if len(kept) > 1:
        kept.sort(key=lambda term: monomial_order(term[0]))
    return Index(tuple(kept), const)


def _rejoin_divisions(merged: dict[Monomial, int]) -> int:
    """Rewrite ``k*n*(x//n) + k*(x%n)`` to ``k*x``: a reshape and its inverse.

    Changes ``merged`` and returns the increment of the constant. One pair at a time, because the
    x of one pair may be part of the next pair.
    """
    const = 0
    while (pair := _division_pair(merged)) is not None:
        remainder, multiple, joined = pair
        for monomial in (remainder, *(m for m, _ in multiple.terms)):
            merged.pop(monomial, None)
        for monomial, coefficient in joined.terms:
            merged[monomial] = merged.get(monomial, 0) + coefficient
        const += joined.const
    return const


def _division_pair(merged: dict[Monomial, int]) -> tuple[Monomial, Index, Index] | None:
    """Return the monomial of a ``k*(x%n)``, the ``k*n*(x//n)`` beside it, and ``k*x``, or None."""
    for monomial, coefficient in merged.items():
        for atom in (a for a in monomial if coefficient and isinstance(a, Mod)):
            scale = sum_of_terms([(without(monomial, atom), coefficient)], 0)
            multiple = scale * atom.divisor * floordiv(atom.dividend, atom.divisor)
            if multiple.terms and not multiple.const and merged.items() >= set(multiple.terms):
                return monomial, multiple, scale * atom.dividend
    return None


_SMALL = tuple(Index((), value) for value in range(17))
"""Cached small constants, the most frequent results of arithmetic."""


@functools.lru_cache(maxsize=1 << 14)
def floordiv(a: Index, b: Index) -> Index:
    """Return ``a // b``, simplified where bounds prove it."""
    if a is index(0):
        return a
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
    below = not b.is_constant and is_nonnegative(-1 - a)
    if below and (is_nonnegative(a + b) or (a is index(-1) and _is_positive(b))):
        return index(-1)
    if len(a.terms) == 1 and not a.const:
        (inner, *others), c = a.terms[0]
        if c == 1 and not others and _is_floor(inner) and _is_positive(b):
            return floordiv(inner.dividend, inner.divisor * b)
    for factor, multiple, _ in common_factors(a, b, _divide_terms, is_in_range):
        return floordiv(multiple, index(b.const // factor))
    return index(FloorDiv(a, b))


@functools.lru_cache(maxsize=1 << 14)
def mod(a: Index, b: Index) -> Index:
    """Return ``a % b``, simplified where bounds prove it."""
    if a is index(0):
        return a
    quotient, remainder = _divide_terms(a, b)
    if quotient is not None and (quotient.terms or quotient.const):
        return mod(remainder, b)
    if a.is_constant and b.is_constant and b.const:
        return index(a.const % b.const)
    if is_in_range(a, b):
        return a
    for factor, multiple, rest in common_factors(a, b, _divide_terms, is_in_range):
        return mod(multiple, index(b.const // factor)) * factor + rest
    if a.const:  # keep rejoinable: no constant in the dividend of a Mod
        return a - b * floordiv(a, b)
    return index(Mod(a, b))


def _divide_terms(a: Index, b: Index) -> tuple[Index | None, Index]:
    """Split a into ``q*b + r`` term by term, by the term of b with the most factors."""
    if b.is_constant:
        n = b.const
        if n == 0:
            return None, a
        divisible = tuple((m, c // n) for m, c in a.terms if c % n == 0)
        indivisible = tuple((m, c) for m, c in a.terms if c % n)
        return Index(divisible, a.const // n), Index(indivisible, a.const % n)
    divisor, n = max(b.terms, key=lambda term: len(term[0]))
    for atom in (atom for atom in divisor if isinstance(atom, Quotient) and atom.cancels):
        quotient, _ = _divide_terms(a * atom.divisor, b * atom.divisor)
        return quotient, a if quotient is None else a - quotient * b
    is_sum = len(b.terms) > 1 or b.const
    rest, total = a, index(0)
    for _ in range(_LONGEST_DIVISION if is_sum else 1):
        parts = [
            (left, c // n)
            for m, c in rest.terms
            if c % n == 0 and (left := divided(m, divisor)) is not None
        ]
        if not parts:
            break
        quotient = sum_of_terms(parts, 0)
        total, rest = total + quotient, rest - quotient * b
    return total, rest


_LONGEST_DIVISION = 4
"""Most steps of a division by a sum; ``(s*n - s + i) // (n - 1)`` takes one: s, and i is left."""


def is_in_range(value: Index, extent: Index) -> bool:
    """Return True if ``0 <= value < extent`` is provable from the domains of its axes."""
    axis = value.as_axis()
    if axis is not None and axis.extent is extent:
        return True
    return is_nonnegative(value) and is_nonnegative(extent - 1 - value)


@functools.lru_cache(maxsize=1 << 14)
def is_nonnegative(value: Index) -> bool:
    """Return True if ``value >= 0`` is provable from domains of axes and lower bounds of sizes.

    First with every division bounded by itself, then with divisions that are multiplied by their
    divisor bounded by the dividend: ``x - (n - 1) <= n*(x//n) <= x``. Last, by solving for the
    dividend of a lone division: ``x//n <= v`` is ``x < n*(v + 1)``, ``x//n >= v`` is ``x >= n*v``.
    """
    for relaxed in _relaxations(value):
        low = _least(relaxed)
        if low is not None and _holds(low):
            return True
    return any(is_nonnegative(undivided) for undivided in _without_divisions(value))


def _without_divisions(value: Index) -> Iterator[Index]:
    """Yield an index that is >= 0 if and only if ``value`` is, without one of its divisions.

    That is an outermost one, a term by itself and in no other term: so the recursion ends.
    """
    divisions = [atom for monomial, _ in value.terms for atom in monomial if _is_floor(atom)]
    depth = max((atom.depth for atom in divisions), default=0)
    for monomial, coefficient in value.terms:
        atom = monomial[0]
        if len(monomial) > 1 or abs(coefficient) != 1 or not _is_floor(atom):
            continue
        outermost = atom.depth == depth and divisions.count(atom) == 1
        if outermost and _is_positive(atom.divisor):
            rest = value - index(atom) * coefficient
            if coefficient > 0:
                yield rest * atom.divisor + atom.dividend
            else:
                yield (rest + 1) * atom.divisor - 1 - atom.dividend


def _holds(low: Index) -> bool:
    """Prove ``low >= 0``, where no axis is left outside divisions."""
    if _sizes_nonnegative(low):
        return True
    bounded = _bound_atoms(low, _is_division)
    if bounded is not None and _sizes_nonnegative(bounded):
        return True
    for relaxed in _relaxations(low):
        if _sizes_nonnegative(relaxed) or _sizes_nonnegative(_at_most(relaxed)):
            return True
    if any(map(is_nonnegative, _without_divisions(low))):
        return True
    return holds_by_bounds(relaxed, is_nonnegative)


def _at_most(low: Index) -> Index:
    """Replace each size by its greatest value where it is subtracted, alone or as a factor."""
    total = low
    for monomial, coefficient in low.terms:
        if coefficient < 0 and (len(monomial) == 1 or _all_nonnegative(monomial)):
            greatest = (a.most if isinstance(a, Size) and a.most else a for a in monomial)
            total = total + (product(map(index, greatest)) - product(monomial)) * coefficient
    return total


def _least(value: Index) -> Index | None:
    """Return a lower bound without axes: each is at the end of its domain that minimises the sum.

    None where there is none. Ragged axes go first, because their limits mention other axes.
    """
    axes = {x for m, _ in value.terms for x in m if isinstance(x, Axis)}
    if not axes:
        return _bound_atoms(value, _is_varying)
    axis = min(axes, key=lambda a: (a.limit is None, -a.serial))
    rest = sum_of_terms([(m, c) for m, c in value.terms if axis not in m], value.const)
    factors = [(without(m, axis), c) for m, c in value.terms if axis in m]
    factor = sum_of_terms(factors, 0)
    if _is_step(factor):
        return _least(rest)
    if not _is_step(-factor):  # of either sign: bound each term by itself
        if not all(_all_nonnegative(m) for m, _ in factors):
            return None
        factor = sum_of_terms([(m, c) for m, c in factors if c < 0], 0)
    loose = _least(rest + factor * (axis.extent - 1))
    tight = None if axis.limit is None else _least(rest + factor * (axis.limit - 1))
    if tight is None or (loose is not None and not _holds(tight) and not _holds(tight - loose)):
        return loose
    return tight


def _is_step(factor: Index) -> bool:
    """Prove ``factor >= 0`` for the factor of an axis, such as ``n - n//2``."""
    is_sum = len(factor.terms) > 1 and not factor.axes
    return _sizes_nonnegative(factor) or (is_sum and is_nonnegative(factor))


def _is_floor(atom: Atom) -> TypeGuard[FloorDiv]:
    """Return True for a division that rounds; a ``Quotient`` is an atom like a size."""
    return isinstance(atom, FloorDiv) and not isinstance(atom, Quotient)


def _is_division(atom: Atom) -> bool:
    return _is_floor(atom) or isinstance(atom, Mod | Runtime)


def _is_varying(atom: Atom) -> bool:
    return isinstance(atom, Runtime) or (_is_division(atom) and bool(atom.axes))


def _bound_atoms(value: Index, chosen: Callable[[Atom], bool]) -> Index | None:
    """Return a lower bound in which no chosen division or gather is left, or None."""
    total = index(value.const)
    for monomial, coefficient in value.terms:
        bounded = [atom for atom in monomial if chosen(atom)]
        term = product((coefficient, *(atom for atom in monomial if not chosen(atom))))
        if bounded:
            bound = (_least_product if coefficient > 0 else _most_product)(bounded)
            if bound is None or not _all_nonnegative(a for a in monomial if not chosen(a)):
                return None
            term = term * bound
        total = total + term
    return total


def _most_product(atoms: list[Atom]) -> Index | None:
    bounds = [most_atom(atom) for atom in atoms]
    if None in bounds or (len(atoms) > 1 and not _all_nonnegative(atoms)):
        return None
    return product(bound for bound in bounds if bound is not None)


def _least_product(atoms: list[Atom]) -> Index | None:
    atom = atoms[0]
    if len(atoms) == 1 and _is_floor(atom):
        return _divide_bound(_least(atom.dividend), atom.divisor)
    return index(0) if _all_nonnegative(atoms) else None


def most_atom(atom: Atom) -> Index | None:
    """Return the greatest value of a division or gather, free of axes; None where unknown."""
    match atom:
        case Quotient():
            return index(atom)
        case FloorDiv():
            return _divide_bound(greatest(atom.dividend), atom.divisor)
        case Mod():
            return atom.divisor - 1 if _is_positive(atom.divisor) else None
        case Runtime():
            return atom.extent - 1
        case _:
            return None


def _divide_bound(bound: Index | None, divisor: Index) -> Index | None:
    return floordiv(bound, divisor) if bound is not None and _is_positive(divisor) else None


def _is_positive(divisor: Index) -> bool:
    """Prove ``divisor > 0``: a divisor is never 0, so that ``divisor >= 0`` suffices."""
    return divisor.const > 0 if divisor.is_constant else is_nonnegative(divisor)


def _relaxations(value: Index) -> Iterator[Index]:
    """Yield ``value``, then lower bounds of it, each with more divisions bounded.

    First by others of the sum: ``x//(k*n)`` by ``x//n``. Then divisions whose bound cancels a term:
    with q for n//4, ``4*q*x - 16*q*(x//4)`` is at least ``4*q*x - 4*q*x``, which is 0; if q is
    bounded as well, n and x are left. Then the outermost, because they may contain other terms:
    with q for x//n, ``q - 3*((q + 1)//3)`` is at least ``q - (q + 1)``, where q cancels; it does
    not where each is bounded alone.
    """
    yield value
    joined = with_outer_divisions(value, is_nonnegative)
    if joined is not value:
        yield (value := joined)
    while found := tuple(_relaxed_terms(value)):
        first = max(rank for rank, _ in found)
        value = value + sum(change for rank, change in found if rank == first)
        yield value


def _relaxed_terms(value: Index) -> Iterator[tuple[tuple[bool, int], Index]]:
    """Yield the changes of ``k*n*(x//n)`` to ``k*x``, or to ``k*(x - (n-1))`` for k > 0.

    Each with its rank: whether it has a monomial of ``value``, and the depth of the division.
    """
    there = {monomial for monomial, _ in value.terms}
    for monomial, coefficient in value.terms:
        bounds = [
            ((any(m in there for m, _ in low.terms), atom.depth), low)
            for atom in monomial
            if _is_floor(atom) and (low := _relaxed(monomial, coefficient, atom)) is not None
        ]
        if bounds:
            rank, low = max(bounds, key=lambda bound: bound[0])
            yield rank, low - Index(((monomial, coefficient),), 0)


def _relaxed(monomial: Monomial, coefficient: int, atom: FloorDiv) -> Index | None:
    """Return a lower bound of a term with one division replaced by its dividend, or None."""
    others, divisor = without(monomial, atom), atom.divisor
    if not _is_positive(divisor) or not _all_nonnegative(others):
        return None
    if coefficient < 0 and divisor.is_constant and _constant_least(atom) is not None:
        coefficient -= coefficient % divisor.const
    factor, left = _divide_terms(sum_of_terms([(others, coefficient)], 0), divisor)
    if factor is None or left is not index(0):
        return None
    return factor * (atom.dividend - (divisor - 1 if coefficient > 0 else 0))


def greatest(value: Index) -> Index | None:
    """Return the greatest value over all axes, in sizes, where it is known, else None."""
    low = _least(-value)
    return None if low is None else -low


def most(value: Index) -> int | None:
    """Return the greatest value as an integer where it is a known constant, else None."""
    high = greatest(value)
    return high.const if high is not None and high.is_constant else None


def least(value: Index) -> int | None:
    """Return the least value as an integer where it is a known constant, else None."""
    low = _least(value)
    return low.const if low is not None and low.is_constant else None


def _sizes_nonnegative(value: Index) -> bool:
    """Prove ``value >= 0`` for a polynomial in sizes and other atoms with constant lower bounds."""
    expanded = shifted(value, _constant_least)
    return expanded is not None and all(c >= 0 for c in expanded.values())


def _constant_least(atom: Atom) -> int | None:
    """Return a constant lower bound of 0 or more, or None."""
    match atom:
        case Axis() | Runtime():
            return 0
        case Size():
            return atom.least if atom.least is not None and atom.least >= 0 else None
        case Mod():
            return 0 if _is_positive(atom.divisor) else None
        case Quotient():
            if not (_is_positive(atom.divisor) and is_nonnegative(atom.dividend)):
                return None
            return 1 if is_nonnegative(atom.dividend - 1) else 0
        case FloorDiv():
            low = _least(atom.dividend)
            expanded = None if low is None else shifted(low, _constant_least)
            if expanded is None or min(expanded.values()) < 0 or not _is_positive(atom.divisor):
                return None
            return expanded[()] // atom.divisor.const if atom.divisor.is_constant else 0


def _all_nonnegative(atoms: Iterable[Atom]) -> bool:
    return all(_constant_least(atom) is not None for atom in atoms)


def product(values: Iterable[IntoIndex]) -> Index:
    """Return the product of indices (of extents: the number of elements)."""
    return functools.reduce(Index.__mul__, values, index(1))
