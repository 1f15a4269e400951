"""Helpers that build scalar operations on expressions and Python numbers."""

from __future__ import annotations

from collections.abc import Callable

from fusec.errors import Unsupported
from fusec.frontend.call import number
from fusec.ir.dtype import BOOL
from fusec.ir.expr import Const, Expr, Op, Select, op


def like(value: float | int | bool, x: Expr) -> Expr:
    """Return a number as a constant of the type of ``x``."""
    return number(value, x.dtype)


def _beside_numbers(name: str) -> Callable[[Expr, Expr | float], Expr]:
    """Return a scalar operation whose second argument may be a number."""

    def spelled(a: Expr, b: Expr | float) -> Expr:
        return op(name, a, b if isinstance(b, Expr) else like(b, a))

    return spelled


add, sub, div = map(_beside_numbers, ("add", "sub", "div"))
less, greater, equal = map(_beside_numbers, ("lt", "gt", "eq"))


def mul(a: Expr, b: Expr | float) -> Expr:
    """Return a * b; a factor of exactly one is left out."""
    factor = b if not isinstance(b, float | int) else like(b, a)
    if isinstance(factor, Const) and factor.value == 1:
        return a
    if isinstance(a, Const) and a.value == 1:
        return factor
    return op("mul", a, factor)


def select(condition: Expr, then: Expr, other: Expr) -> Expr:
    return Select(condition, then, other)


def negate(a: Expr) -> Expr:
    """Return -a, or the negation of a condition."""
    return Op("not" if a.dtype is BOOL else "neg", (a,))


def integer_power(x: Expr, exponent: int) -> Expr:
    """Return ``x ** exponent`` by repeated squaring, for 0 <= exponent <= 64.

    Raises:
        Unsupported: for other exponents.
    """
    if not 0 <= exponent <= 64:
        raise Unsupported("an integer power with this exponent")
    result: Expr | None = None
    square = x
    while exponent:
        if exponent & 1:
            result = square if result is None else op("mul", result, square)
        exponent >>= 1
        if exponent:
            square = op("mul", square, square)
    return like(1, x) if result is None else result
