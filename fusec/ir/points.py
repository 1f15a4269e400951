"""Proofs by trial that an index is in range: at each point of a small domain, or as traced.

Chains of rolls and strided windows leave divisions whose errors cancel exactly, and only together,
so that bounds of the single terms prove nothing. Worked example: for ``i < 6``, ``i//2 - i//3`` is
0, 0, 1, 0, 1, 1, so in ``[0, 2)``, though ``i//2`` alone reaches 2.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from fusec.errors import InternalError
from fusec.ir.atoms import Atom, Axis, FloorDiv, Mod, Runtime, Size
from fusec.ir.index import Index, index, is_in_range

POINTS_TRIED = 1 << 13
"""The largest domain in which an index that is not provably in range is evaluated everywhere."""


def is_in_range_everywhere(value: Index, extent: Index) -> bool:
    """Return True if an index is in range at every point, tried over a small constant domain.

    What is read from memory takes each value that it may have, whatever others are.
    """
    domain = set(_coordinates(value))
    while more := {c for a in domain for c in _coordinates(_limit(a))} - domain:
        domain |= more
    if not extent.is_constant or not all(atom.extent.is_constant for atom in domain):
        return False
    points = math.prod(atom.extent.const for atom in domain)
    if points > POINTS_TRIED or not _can_be_evaluated(value):
        return False
    axes = tuple(domain)
    limits = {a: n for a in axes if (n := _limit(a)) is not None and _can_be_evaluated(n)}
    for coordinates in itertools.product(*(range(atom.extent.const) for atom in axes)):
        at = dict(zip(axes, coordinates, strict=True))
        of = functools.partial(_value, at=at)
        outside = any(at[axis] >= limit.evaluate(of) for axis, limit in limits.items())
        if not outside and not 0 <= value.evaluate(of) < extent.const:
            return False
    return True


def is_in_range_as_traced(value: Index, extent: Index) -> bool:
    """Return True if ``0 <= value < extent`` is provable where each size has its traced value."""
    value, extent = as_traced((value, extent))
    return is_in_range(value, extent) or is_in_range_everywhere(value, extent)


def as_traced(values: Iterable[Index]) -> tuple[Index, ...]:
    """Return indices with each size replaced by its hint, also in extents of axes."""

    @functools.cache
    def atom(one: Atom) -> Index:
        match one:
            case Size():
                return index(one.hint)
            case Axis():
                limit = None if one.limit is None else whole(one.limit)
                return index(Axis(one.name, whole(one.extent), limit))
            case FloorDiv():
                return whole(one.dividend) // whole(one.divisor)
            case Mod():
                return whole(one.dividend) % whole(one.divisor)
            case Runtime():
                return index(Runtime(one.expr, whole(one.extent)))

    def whole(value: Index) -> Index:
        return index(0) + value.evaluate(atom)

    return tuple(whole(value) for value in values)


def _coordinates(value: Index | None) -> Iterator[Axis | Runtime]:
    """Yield what an index is evaluated from."""
    atoms = () if value is None else value.atoms()
    return (atom for atom in atoms if isinstance(atom, Axis | Runtime))


def _limit(atom: Axis | Runtime) -> Index | None:
    return atom.limit if isinstance(atom, Axis) else None


def _can_be_evaluated(value: Index) -> bool:
    """Return True if an index has no sizes, and constant positive divisors."""
    divisors = [a.divisor for a in value.atoms() if isinstance(a, FloorDiv | Mod)]
    positive = all(d.is_constant and d.const > 0 for d in divisors)
    return positive and not any(isinstance(a, Size) for a in value.atoms())


def _value(atom: Atom, at: Mapping[Axis | Runtime, int]) -> int:
    """Return the value of an atom at one point."""
    match atom:
        case Axis() | Runtime():
            return at[atom]
        case FloorDiv() | Mod():
            dividend: int = atom.dividend.evaluate(functools.partial(_value, at=at))
            divisor = atom.divisor.const
            return dividend // divisor if isinstance(atom, FloorDiv) else dividend % divisor
    raise InternalError(atom, stage="ir.points")
