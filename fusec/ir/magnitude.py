"""How many bits an index needs: bounds on the absolute values of its sum, with usual sizes.

Worked example: where n is not known, 32 bits hold i of ``i < n``, but not ``2*i``.
"""

from __future__ import annotations

import math
from functools import partial

from fusec.errors import InternalError
from fusec.ir.atoms import MAX_SIZE, Atom, Axis, FloorDiv, Mod, Runtime, Size
from fusec.ir.index import Index, greatest


def may_wrap(value: Index, bits: int) -> bool:
    """Return True if an integer of so many bits may not hold an index, where sizes are usual.

    That is up to ``MAX_SIZE``, and tensors of up to 2^32 elements: where n is not known, 32 bits
    hold i of ``i < n``, but not ``2*i``; 64 bits hold ``(i*n + j)*8``.
    """
    ends = (value if end is None else end for end in (greatest(value), greatest(-value)))
    return any(magnitude(end, elements=1 << 32) >= 1 << bits - 1 for end in ends)


def magnitude(value: Index, elements: float = math.inf) -> float:
    """Return a bound on the absolute value of every partial sum of ``value``.

    Args:
        elements: a bound on products, for those that number elements.
    """
    total: float = abs(value.const)
    for monomial, coefficient in value.terms:
        bound = math.prod(map(partial(_atom_bound, elements=elements), monomial))
        total += abs(coefficient) * (min(bound, elements) if len(monomial) > 1 else bound)
    return total


def _atom_bound(atom: Atom, elements: float) -> float:
    match atom:
        case Size(least=least, most=most):
            if most is None or least is None or least < 0:
                return MAX_SIZE
            return min(most, MAX_SIZE)
        case Axis() | Runtime():
            return max(magnitude(atom.extent, elements) - 1, 0)
        case Mod():
            return magnitude(atom.divisor, elements)
        case FloorDiv():
            bound = magnitude(atom.dividend, elements)
            divisor = abs(atom.divisor.const) if atom.divisor.is_constant else 1
            return bound // max(divisor, 1) + 1
        case _:
            raise InternalError(atom, stage="ir.magnitude")
