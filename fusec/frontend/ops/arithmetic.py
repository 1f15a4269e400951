"""Helpers that build scalar operations on expressions and Python numbers."""

from __future__ import annotations

import operator
from functools import partial

from fusec.errors import Unsupported
from fusec.frontend.call import number
from fusec.ir.dtype import BOOL
from fusec.ir.expr import Expr, op
from fusec.ir.expr import select as select

add, sub, mul, div = operator.add, operator.sub, operator.mul, operator.truediv
less, greater, equal = (partial(op, name) for name in ("lt", "gt", "eq"))


def like(value: float | int | bool, x: Expr) -> Expr:
    """Return a number as a constant of the type of ``x``."""
    return number(value, x.dtype)


def negate(a: Expr) -> Expr:
    """Return -a, or the negation of a condition."""
    return op("not" if a.dtype is BOOL else "neg", a)


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
            result = square if result is None else result * square
        exponent >>= 1
        if exponent:
            square = square * square
    return like(1, x) if result is None else result
