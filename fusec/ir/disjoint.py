"""The race check of stores: prove that different points write different elements.

A tuple of indices determines an axis if its coordinate can be computed from their values. Three
steps, repeated until nothing new is found:

* an index that is a mixed-radix number over unknown atoms, ``k1*a1 + k2*a2 + ...`` in which each
  ``k`` exceeds the greatest value of the sum of all lower digits, determines its digits: with
  ``r < 13`` and ``13*p + r < 200``, which is r's limit, ``200*m + 13*p + r`` determines m, p and r;
* an atom whose axes are all determined is determined;
* ``x % n`` and ``x // n`` together determine ``x``, which is then one more index.

Worked example: ``m*C + c`` with c < C determines m and c; ``(m//8, m%8)`` determines m; ``m//8``
determines nothing.
"""

from __future__ import annotations

import math

from fusec.ir.expr import Buffer, substitute
from fusec.ir.index import (
    Atom,
    Axis,
    Index,
    Mod,
    Size,
    floordiv,
    index,
    is_nonnegative,
    most_atom,
    product,
)


def determined_axes(indices: tuple[Index, ...]) -> frozenset[Axis]:
    """Return the axes of ``indices`` whose coordinates follow from the values of all of them."""
    known: set[Atom] = set()
    equations = list(dict.fromkeys(indices))
    before = (-1, -1)
    while before != (len(known), len(equations)):
        before = (len(known), len(equations))
        for equation in equations:
            known |= _digits(equation, known)
        for atom in tuple(known):
            if isinstance(atom, Mod) and atom.dividend not in equations:
                quotient = floordiv(atom.dividend, atom.divisor)
                if all(_is_known(a, known) for m, _ in quotient.terms for a in m):
                    equations.append(atom.dividend)
    return frozenset(atom for atom in known if isinstance(atom, Axis))


def has_distinct_elements(buffer: Buffer) -> bool:
    """Return True if all positions of ``buffer`` are provably distinct elements of its storage."""
    axes = tuple(Axis(f"d{i}", extent) for i, extent in enumerate(buffer.shape))
    known = determined_axes((buffer.offset(tuple(map(index, axes))),))
    return all(axis in known or axis.extent is index(1) for axis in axes)


def are_apart(one: tuple[Index, ...], other: tuple[Index, ...]) -> bool:
    """Return True if two tuples of indices provably never address the same element.

    In some position all values of one tuple are below all of the other's, or the two differ in
    what a common factor of all steps leaves, such as ``2*n*i`` and ``2*n*i + 1``, or are
    mixed-radix numbers that differ in a digit, such as ``64*i + j`` and ``64*i + j + 32``, j < 32.
    """
    axes = {axis for value in other for axis in value.axes}
    renamed = {axis: index(Axis(axis.name, axis.extent, axis.limit)) for axis in axes}
    for a, b in zip(one, (substitute(value, renamed) for value in other), strict=True):
        if is_nonnegative(b - a - 1) or is_nonnegative(a - b - 1) or _is_never_zero(a - b):
            return True
    return False


UNKNOWN = 1 << 62
"""The last value of an axis whose extent is symbolic: more than any extent."""
CHOICES = 3
"""Most values of a digit to try; there are two where lower digits sum to less than its step."""


def _is_never_zero(value: Index) -> bool:
    """Return True if an index is provably never 0: by a divisor of all steps, or by its digits."""
    common = math.gcd(*(coefficient for _, coefficient in value.terms))
    if common and value.const % common:
        return True
    digits: dict[int, tuple[int, int]] = {}
    for monomial, coefficient in value.terms:
        axis, *others = monomial
        if others or not isinstance(axis, Axis):
            return False
        last = axis.extent.const - 1 if axis.extent.is_constant else UNKNOWN
        low, high = digits.get(abs(coefficient), (0, 0))
        far = (low, high + last) if coefficient > 0 else (low - last, high)
        digits[abs(coefficient)] = far
    return not _may_reach(sorted(digits.items()), -value.const)


def _may_reach(digits: list[tuple[int, tuple[int, int]]], wanted: int) -> bool:
    """Return False if ``sum(step * digit)`` is never ``wanted``; ``digits`` are (step, range)."""
    if not digits:
        return wanted == 0
    *below, (step, (low, high)) = digits
    least = sum(s * first for s, (first, _) in below)
    most = sum(s * last for s, (_, last) in below)
    first, last = max(low, -((most - wanted) // step)), min(high, (wanted - least) // step)
    if last - first >= CHOICES:
        return True
    return any(_may_reach(below, wanted - step * d) for d in range(first, last + 1))


def _is_known(atom: Atom, known: set[Atom]) -> bool:
    if isinstance(atom, Size) or atom in known:
        return True
    if isinstance(atom, Axis):
        return atom.extent is index(1)
    return all(_is_known(axis, known) for axis in atom.axes)


def _digits(equation: Index, known: set[Atom]) -> set[Atom]:
    """Return the unknown atoms of a mixed-radix number; none if it is not one."""
    steps: dict[Atom, Index] = {}
    for monomial, coefficient in equation.terms:
        unknown = [atom for atom in monomial if not _is_known(atom, known)]
        if not unknown:
            continue
        if len(unknown) != 1:
            return set()
        step = product((coefficient, *(atom for atom in monomial if atom is not unknown[0])))
        steps[unknown[0]] = steps.get(unknown[0], index(0)) + step
    span = below = index(0)  # of lower digits: the greatest sum by extents; the sum, with limits
    for atom, step in sorted(steps.items(), key=lambda item: abs(item[1].hint())):
        if step.hint() < 0:
            step = -step
        extent = atom.extent if isinstance(atom, Axis) else _extent(atom)
        if extent is None or not any(is_nonnegative(step - value - 1) for value in (span, below)):
            return set()
        span, below = span + step * (extent - 1), below + step * index(atom)
    return set(steps)


def _extent(atom: Atom) -> Index | None:
    """Return one more than the greatest value of an atom that is never negative, or None."""
    high = most_atom(atom)
    return high + 1 if high is not None and is_nonnegative(index(atom)) else None
