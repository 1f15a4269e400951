"""Proofs of ``low >= 0`` by relations between sizes.

Such relations are ``s <= t``, and the minimum of two sums.

Where a size is subtracted, an upper bound may be substituted for it. Elsewhere a minimum of two
sums is one of the two, so that it suffices to prove the claim for each.

Worked example: ``x[1:]`` has ``n - m`` rows and begins at row m, the minimum of 1 and n. Row i of
it is in x because ``n - 1 - m - (n - m - 1)`` is 0; and m is in ``[0, 1]`` because 1 and n both are
at least 0, and it is at most 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from fusec.ir.atoms import Minimum, Size

if TYPE_CHECKING:
    from fusec.ir.index import Index


MOST_CHOICES = 16
"""The most combinations of bounds that are tried for the terms with one size."""


def holds_by_bounds(low: Index, prove: Callable[[Index], bool]) -> bool:
    """Return True if substituting the bounds of a size, if one has any, proves ``low >= 0``."""
    for size in dict.fromkeys(a for m, _ in low.terms for a in m if isinstance(a, Size)):
        if size.bounds and _is_taken_away(low, size):
            if any(map(prove, _bounded(low, size))):
                return True
        elif isinstance(size, Minimum):
            return all(prove(_replaced(low, size, by)) for by in size.args)
    return False


def _bounded(low: Index, size: Size) -> Iterator[Index]:
    """Yield lower bounds with one of a size's bounds in its place, which may be another each time.

    ``s*t - m*t + t - m`` is 0 with s for the first m and t for the other one.
    """
    nothing, times = low * 0, sum(size in monomial for monomial, _ in low.terms)
    choices: Iterable[tuple[Index, ...]] = itertools.product(size.bounds, repeat=times)
    if len(size.bounds) ** times > MOST_CHOICES:
        choices = ((bound,) * times for bound in size.bounds)  # one for all terms
    for chosen in choices:
        bounds, total = iter(chosen), nothing + low.const
        for monomial, coefficient in low.terms:
            factors = (next(bounds) if a is size else nothing + a for a in monomial)
            total = total + math.prod(factors, start=nothing + coefficient)
        yield total


def _is_taken_away(low: Index, size: Size) -> bool:
    terms = [(m, c) for m, c in low.terms if size in m]
    factors = (a for m, _ in terms for a in m if a is not size)
    extents = all(isinstance(a, Size) and a.least is not None and a.least >= 0 for a in factors)
    return extents and all(c < 0 and m.count(size) == 1 for m, c in terms)


def _replaced(value: Index, size: Size, by: Index) -> Index:
    """Return a sum with ``by`` substituted for a size, except inside divisions."""
    nothing = by * 0
    return nothing + value.evaluate(lambda atom: by if atom is size else nothing + atom)
