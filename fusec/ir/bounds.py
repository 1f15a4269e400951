"""Proofs of ``low >= 0`` by relations between sizes: ``s <= t``, the minimum of two sums.

Where a size is subtracted, an upper bound may be substituted for it. Elsewhere a minimum of two
sums is one of the two, so that it suffices to prove the claim for each.

Worked example: ``x[1:]`` has ``n - m`` rows and begins at row m, the minimum of 1 and n. Row i of
it is in x because ``n - 1 - m - (n - m - 1)`` is 0; and m is in ``[0, 1]`` because 1 and n both are
at least 0, and it is at most 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fusec.ir.atoms import Minimum, Size

if TYPE_CHECKING:
    from fusec.ir.index import Index


def holds_by_bounds(low: Index, prove: Callable[[Index], bool]) -> bool:
    """Return True if substituting the bounds of a size, if one has any, proves ``low >= 0``."""
    for size in dict.fromkeys(a for m, _ in low.terms for a in m if isinstance(a, Size)):
        if size.bounds and _is_taken_away(low, size):
            if any(prove(_replaced(low, size, by)) for by in size.bounds):
                return True
        elif isinstance(size, Minimum):
            return all(prove(_replaced(low, size, by)) for by in size.args)
    return False


def _is_taken_away(low: Index, size: Size) -> bool:
    terms = [(m, c) for m, c in low.terms if size in m]
    factors = (a for m, _ in terms for a in m if a is not size)
    extents = all(isinstance(a, Size) and a.least is not None and a.least >= 0 for a in factors)
    return extents and all(c < 0 and m.count(size) == 1 for m, c in terms)


def _replaced(value: Index, size: Size, by: Index) -> Index:
    """Return a sum with ``by`` substituted for a size, except inside divisions."""
    nothing = by * 0
    return nothing + value.evaluate(lambda atom: by if atom is size else nothing + atom)
