"""Signs of polynomials in atoms of which each has a constant lower bound; factors, divisions.

Worked example: with n >= 2 and m >= 1, let ``n = 2 + a`` and ``m = 1 + b``. Then ``n*m - 2*m`` is
``(2 + a)*(1 + b) - 2*(1 + b) = a*b + a``: no coefficient is negative, so the sum is not, either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fusec.ir.atoms import Atom, FloorDiv, Monomial, without

if TYPE_CHECKING:
    from fusec.ir.index import Index


def shifted(value: Index, least: Callable[[Atom], int | None]) -> dict[Monomial, int] | None:
    """Return the coefficients of a sum after each atom x was replaced by ``x' + least(x)``.

    An atom in a monomial stands for x', which is >= 0; the empty monomial is the constant. None
    where an atom has no lower bound.
    """
    expanded: dict[Monomial, int] = {(): value.const}
    for monomial, coefficient in value.terms:
        partial: dict[Monomial, int] = {(): coefficient}
        for atom in monomial:
            low = least(atom)
            if low is None:
                return None
            grown = {(*m, atom): c for m, c in partial.items()}
            for m, c in partial.items():
                grown[m] = grown.get(m, 0) + c * low
            partial = grown
        for m, c in partial.items():
            expanded[m] = expanded.get(m, 0) + c
    return expanded


def common_factors(
    value: Index,
    divisor: Index,
    divide: Callable[[Index, Index], tuple[Index | None, Index]],
    is_in_range: Callable[[Index, Index], bool],
) -> Iterator[tuple[int, Index, Index]]:
    """Yield g, q and r where a value is ``g*q + r`` with ``0 <= r < g``, and g > 1 divides n.

    Then ``value // n`` is ``q // (n/g)``, and ``value % n`` is ``g*(q % (n/g)) + r``. The place of
    a lane in a row of heads is such: ``(8*o + l) // 64`` is ``o // 8``, the same in all 8 lanes.
    Multiples are left as they are: that ``8 * (m // 8) <= m`` is known of m as it is written.
    """
    n = divisor.const if divisor.is_constant else 0
    for factor in sorted({math.gcd(n, c) for _, c in value.terms}, reverse=True):
        multiple, rest = divide(value, divisor * 0 + factor)
        if not 1 < factor < n or multiple is None or rest is divisor * 0:
            continue
        if is_in_range(rest, divisor * 0 + factor):
            yield factor, multiple, rest


def with_outer_divisions(value: Index, is_nonnegative: Callable[[Index], bool]) -> Index:
    """Return a lower bound with ``-(x//n)`` for ``-k*(x//(k*n))``, where the sum has ``x//n``.

    Tiles of 16 of ``x//n`` elements are such: there are ``x//(16*n)`` whole ones.
    """
    nothing, total = value * 0, value
    floors = [a for monomial, _ in value.terms for a in monomial if isinstance(a, FloorDiv)]
    for monomial, coefficient in value.terms:
        for atom, outer in itertools.product(monomial if coefficient < 0 else (), floors):
            if not isinstance(atom, FloorDiv) or outer.dividend is not atom.dividend:
                continue
            k, others = _ratio(atom.divisor, outer.divisor), without(monomial, atom)
            known = (nothing + factor for factor in (outer.divisor, *others))
            if k > 1 and coefficient % k == 0 and all(map(is_nonnegative, known)):
                change = (nothing + outer) * (coefficient // k) - (nothing + atom) * coefficient
                total = total + math.prod((nothing + other for other in others), start=change)
                break
    return total


def _ratio(value: Index, divisor: Index) -> int:
    """Return k where a sum is ``k*divisor``, else 0."""
    first, by = (v.terms[0][1] if v.terms else v.const for v in (value, divisor))
    k = first // by if by else 0
    return k if value is divisor * k else 0
