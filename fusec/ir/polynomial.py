"""Signs of polynomials in atoms of which each has a constant lower bound.

Worked example: with n >= 2 and m >= 1, let ``n = 2 + a`` and ``m = 1 + b``. Then ``n*m - 2*m`` is
``(2 + a)*(1 + b) - 2*(1 + b) = a*b + a``: no coefficient is negative, so the sum is not, either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fusec.ir.atoms import Atom, Monomial

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
            grown.update({m: c * low for m, c in partial.items()})
            partial = grown
        for m, c in partial.items():
            expanded[m] = expanded.get(m, 0) + c
    return expanded
