"""Sizes of dynamic shapes, as data: formulas of their names, and conditions on them.

::

    SIZE      ::= 8 | "B" | ["+" | "*" | "min", SIZE, SIZE, ...] | ["//" | "%", SIZE, SIZE]
    CONDITION ::= ["==" | "!=" | "<" | "<=" | ">" | ">=", SIZE, SIZE]
                | ["and" | "or", CONDITION, ...]

A formula in memory is such a tree of tuples. Worked example: a model that takes ``f32[B, T, 8]``
and has 64 positions has the condition ``["<=", "T", 64]``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from fusec.errors import UsageError

SizeFormula: TypeAlias = "int | str | tuple[Any, ...]"
SizeCondition: TypeAlias = "tuple[Any, ...]"

_MOST = (1 << 63) - 1
_SIGNS: Mapping[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip


def value(size: SizeFormula, sizes: Mapping[str, int]) -> int:
    """Evaluate a formula.

    Raises:
        UsageError: if it divides by zero.
    """
    match size:
        case int():
            return size
        case str():
            return sizes[size]
        case ("+", *parts):
            return sum(value(part, sizes) for part in parts)
        case ("*", *parts):
            return math.prod(value(part, sizes) for part in parts)
        case ("min", *parts):
            return min(value(part, sizes) for part in parts)
        case (sign, dividend, divisor):
            by = value(divisor, sizes)
            if not by:
                raise UsageError(f"{shown(divisor)} is 0.")
            whole, rest = divmod(value(dividend, sizes), by)
            return whole if sign == "//" else rest
    raise ValueError(f"no size: {size!r}")


def extent(size: SizeFormula, sizes: Mapping[str, int]) -> int:
    """Evaluate an extent or a stride.

    Raises:
        UsageError: if it is negative, or does not fit into 64 bits.
    """
    found = value(size, sizes)
    if not 0 <= found <= _MOST:
        raise UsageError(f"{shown(size)} is {found}, which is no size of a tensor.")
    return found


def holds(condition: SizeCondition, sizes: Mapping[str, int]) -> bool:
    """Return True if a condition holds."""
    match condition:
        case ("and", *parts):
            return all(holds(part, sizes) for part in parts)
        case ("or", *parts):
            return any(holds(part, sizes) for part in parts)
        case (sign, left, right):
            return _SIGNS[sign](value(left, sizes), value(right, sizes))
    raise ValueError(f"no condition: {condition!r}")


def bind_sizes(shapes: Iterable[tuple[Sequence[SizeFormula], Sequence[int]]]) -> dict[str, int]:
    """Return sizes by name, from pairs of formulas and extents: the first with a name binds it."""
    sizes: dict[str, int] = {}
    for wanted, given in shapes:
        for size, extent in zip(wanted, given, strict=False):
            if isinstance(size, str):
                sizes.setdefault(size, extent)
    return sizes


def names_in(formula: SizeFormula | SizeCondition) -> Iterator[str]:
    """Yield the names of a formula or a condition."""
    match formula:
        case str():
            yield formula
        case (_, *parts):
            for part in parts:
                yield from names_in(part)


def shown(formula: SizeFormula | SizeCondition) -> str:
    """Return a formula or a condition as people write it: "2*B + 1", "T <= 64"."""
    match formula:
        case ("*" | "//" | "%" as sign, *parts):
            return str(sign).join(_inner(part) for part in parts)
        case ("min", *parts):
            return f"min({', '.join(map(shown, parts))})"
        case ("and" | "or" as sign, *parts):
            return f" {sign} ".join(map(_inner_condition, parts))
        case (str(sign), *parts):
            return f" {sign} ".join(map(shown, parts))
    return str(formula)


def _inner(formula: SizeFormula) -> str:
    text = shown(formula)
    return f"({text})" if isinstance(formula, tuple) and formula[0] != "min" else text


def _inner_condition(condition: SizeCondition) -> str:
    text = shown(condition)
    return f"({text})" if condition[0] in ("and", "or") else text


# -- from JSON -------------------------------------------------------------------------------------


def read_size(found: Any) -> SizeFormula:
    """Return the formula that JSON holds.

    Raises:
        ValueError: for anything else.
    """
    match found:
        case bool() | float() | None:
            raise ValueError(f"no size: {found!r}")
        case int() if found >= 0:
            return found
        case str() if found.isidentifier() and found.isascii():
            return found
        case ["+" | "*" | "min" as sign, _, *_]:
            return (sign, *(_read_term(part) for part in found[1:]))
        case ["//" | "%" as sign, dividend, divisor]:
            return sign, _read_term(dividend), _read_term(divisor)
    raise ValueError(f"no size: {found!r}")


def _read_term(found: Any) -> SizeFormula:
    return found if type(found) is int else read_size(found)  # which may be negative


def read_condition(found: Any) -> SizeCondition:
    """Return the condition that JSON holds.

    Raises:
        ValueError: for anything else.
    """
    match found:
        case ["and" | "or" as sign, *parts]:
            return (sign, *map(read_condition, parts))
        case [str() as sign, left, right] if sign in _SIGNS:
            return sign, _read_term(left), _read_term(right)
    raise ValueError(f"no condition: {found!r}")
