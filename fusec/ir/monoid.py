"""Reductions: an associative, commutative combination and its identity.

Most combine one value. ``argmax`` and ``argmin`` combine pairs of a value and an index, and their
result is the index: the least one of the greatest or least value. A NaN counts as greater and as
less than all numbers; callers give it an index that is less than those of all numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusec.errors import InternalError
from fusec.ir.dtype import BOOL, DType, Kind

_INTEGER_BITS = {"u8": 8, "i8": 8, "i16": 16, "i32": 32, "i64": 64}


@dataclass(frozen=True, slots=True)
class Monoid:
    """A reduction: ``combine`` names a row of ``scalar.SCALAR_OPS``.

    For pairs, it is the comparison by which the first value is better.
    """

    name: str
    combine: str

    def identity(self, dtype: DType) -> float | int | bool:
        """Return e with ``combine(e, x) == x`` for every x of ``dtype``."""
        match self.name:
            case "sum":
                return 0.0 if dtype.is_float else 0
            case "prod":
                return 1.0 if dtype.is_float else 1
            case "any":
                return False
            case "all":
                return True
            case "max":
                return _extreme(dtype, -1)
            case "min" | "argmax" | "argmin":
                return _extreme(dtype, 1)
            case _:
                raise InternalError(self, stage="ir.monoid")

    @property
    def parts(self) -> tuple[Monoid, ...]:
        """The reductions that give each combined value; the last one gives the result."""
        return _PAIRS.get(self.name) or (self,)

    def __repr__(self) -> str:
        return self.name


def _extreme(dtype: DType, sign: int) -> float | int | bool:
    if dtype.is_float:
        return sign * float("inf")
    if dtype is BOOL:
        return sign > 0
    bits = _INTEGER_BITS[dtype.name]
    if dtype.kind is Kind.UNSIGNED:
        return (1 << bits) - 1 if sign > 0 else 0
    return (1 << (bits - 1)) - 1 if sign > 0 else -(1 << (bits - 1))


SUM = Monoid("sum", "add")
PROD = Monoid("prod", "mul")
MAX = Monoid("max", "maximum")
MIN = Monoid("min", "minimum")
ANY = Monoid("any", "or")
ALL = Monoid("all", "and")
ARGMAX = Monoid("argmax", "gt")
ARGMIN = Monoid("argmin", "lt")

_PAIRS = {"argmax": (MAX, ARGMAX), "argmin": (MIN, ARGMIN)}
MONOIDS: dict[str, Monoid] = {m.name: m for m in (SUM, PROD, MAX, MIN, ANY, ALL, ARGMAX, ARGMIN)}
