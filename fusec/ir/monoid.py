"""Reductions: an associative combination and its identity.

Most combine one field. Of those that combine two, the last one is the result:

- ``argmax`` and ``argmin``, of a value and an index, give the least index of the greatest or least
  value. A NaN counts as greater and as less than all numbers; callers give it an index that is less
  than those of all numbers.
- ``expsum``, of an exponent x and a weight w, gives ``sum(w * exp(x - m))``, where m is the
  greatest exponent; infinite ones that are equal differ by 0.
- ``recurrence``, of a factor a and a term b, gives h in ``h[t] = a[t] * h[t-1] + b[t]`` after the
  last step, from h = -0, so that a first b of -0 stays one. It is *ordered*: the combination does
  not commute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusec.ir.dtype import BOOL, DType, Kind


@dataclass(frozen=True, slots=True)
class Monoid:
    """A reduction.

    Attributes:
        combine: a row of ``scalar.SCALAR_OPS``; of an extreme's index, the comparison by which the
            first value is better; of the other pairs, what joins two results of one scale.
        start: the identity; a type without that number has its least or greatest one instead.
        leading: the reductions that give the fields before the result.
        ordered: a reduction combines its points from the first to the last, in no other order.
            It is over one axis.
    """

    name: str
    combine: str
    start: float
    leading: tuple[Monoid, ...] = ()
    ordered: bool = False

    @property
    def fields(self) -> tuple[Monoid, ...]:
        """The reductions that give each combined value; the last one gives the result."""
        return (*self.leading, self)

    def identity(self, dtype: DType) -> float:
        """Return e with ``combine(e, x) == x`` for every x of ``dtype``."""
        if dtype.is_float:
            return float(self.start)
        bits = 1 if dtype is BOOL else 8 * dtype.itemsize
        signed = dtype.kind is Kind.SIGNED
        least = -(1 << (bits - 1)) if signed else 0
        return min(max(self.start, least), least + (1 << bits) - 1)

    def __repr__(self) -> str:
        return self.name


SUM = Monoid("sum", "add", 0)
PROD = Monoid("prod", "mul", 1)
MAX = Monoid("max", "maximum", -math.inf)
MIN = Monoid("min", "minimum", math.inf)
ANY = Monoid("any", "or", False)
ALL = Monoid("all", "and", True)
ARGMAX = Monoid("argmax", "gt", math.inf, (MAX,))
ARGMIN = Monoid("argmin", "lt", math.inf, (MIN,))
EXPSUM = Monoid("expsum", "add", 0, (MAX,))
RECURRENCE = Monoid("recurrence", "add", -0.0, (PROD,), ordered=True)
