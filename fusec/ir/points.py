"""Proofs by trial that an index is in range: it is evaluated at each point of a small domain.

Chains of rolls and strided windows leave divisions whose errors cancel exactly, and only together,
so that bounds of the single terms prove nothing. Worked example: for ``i < 6``, ``i//2 - i//3`` is
0, 0, 1, 0, 1, 1, so in ``[0, 2)``, though ``i//2`` alone reaches 2.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping

from fusec.errors import InternalError
from fusec.ir.atoms import Atom, Axis, FloorDiv, Mod, Runtime, Size
from fusec.ir.index import Index

POINTS_TRIED = 1 << 13
"""The largest domain in which an index that is not provably in range is evaluated everywhere."""


def is_in_range_everywhere(value: Index, extent: Index) -> bool:
    """Return True if an index is in range at every point, tried over a small constant domain."""
    domain = set(value.axes)
    while more := {b for a in domain if a.limit is not None for b in a.limit.axes} - domain:
        domain |= more
    if not extent.is_constant or not all(axis.extent.is_constant for axis in domain):
        return False
    points = math.prod(axis.extent.const for axis in domain)
    if points > POINTS_TRIED or not _follows_from_axes(value):
        return False
    axes = tuple(domain)
    limits = {a: a.limit for a in axes if a.limit is not None and _follows_from_axes(a.limit)}
    for coordinates in itertools.product(*(range(axis.extent.const) for axis in axes)):
        at = dict(zip(axes, coordinates, strict=True))
        of = functools.partial(_value, at=at)
        outside = any(at[axis] >= limit.evaluate(of) for axis, limit in limits.items())
        if not outside and not 0 <= value.evaluate(of) < extent.const:
            return False
    return True


def _follows_from_axes(value: Index) -> bool:
    """Return True if an index has only axes and numbers, and constant positive divisors."""
    divisors = [a.divisor for a in value.atoms() if isinstance(a, FloorDiv | Mod)]
    positive = all(d.is_constant and d.const > 0 for d in divisors)
    return positive and not any(isinstance(a, Size | Runtime) for a in value.atoms())


def _value(atom: Atom, at: Mapping[Axis, int]) -> int:
    """Return the value of an atom that follows from axes, at one point."""
    match atom:
        case Axis():
            return at[atom]
        case FloorDiv() | Mod():
            dividend: int = atom.dividend.evaluate(functools.partial(_value, at=at))
            divisor = atom.divisor.const
            return dividend // divisor if isinstance(atom, FloorDiv) else dividend % divisor
    raise InternalError(atom, stage="ir.points")
