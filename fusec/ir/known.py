"""What an expression is where some of its nodes are known numbers, infinities above all.

A rewrite that is exact for finite numbers asks what becomes of its result at an infinity. Known
operands give a known result; so do some unknown ones beside an infinity or NaN: ``inf + x`` is inf,
or NaN. Of finite results 0, 1 and -1 alone are known, which no rounding changes.

Worked example: where m is inf, ``where(abs(m) == inf, 0, m)`` is 0, and ``maximum(m, c)``, with a c
that may be NaN, is inf or NaN; ``m - maximum(m, c)`` is NaN in both cases.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TypeAlias

from fusec.ir.dtype import BOOL, DType
from fusec.ir.expr import Cast, Const, Expr, Op, Select, reach
from fusec.ir.scalar import ROUND

Known: TypeAlias = tuple[float, bool]
"""A number, and whether it is certain; else it is that number or NaN."""

_EXACT = (-1, 0, 1)
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_ARITHMETIC: dict[str, Callable[..., float | None]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: a / b if b else None,
    "maximum": max,
    "minimum": min,
    "neg": operator.neg,
    "abs": abs,
    "exp": {math.inf: math.inf, -math.inf: 0.0, 0.0: 1.0}.get,
    "log": {math.inf: math.inf, 0.0: -math.inf, 1.0: 0.0}.get,
    **dict.fromkeys(ROUND.values(), lambda a: a),
}
"""Operation -> its result for numbers other than NaN, or None if that is not known."""
_PREVAILING = {
    "add": (math.inf, -math.inf),
    "sub": (math.inf, -math.inf),
    "maximum": (math.inf,),
    "minimum": (-math.inf,),
}
"""Operation -> what its result is, or NaN, beside what is unknown (of ``sub``: subtracted)."""


def is_known_nan(root: Expr, given: Mapping[Expr, float]) -> bool:
    """Return True if an expression is NaN wherever some of its nodes are the numbers ``given``."""
    found: dict[Expr, Known | None] = {node: (value, True) for node, value in given.items()}
    for node in reach((root,), lambda node: () if node in given else _operands(node)):
        if node not in found:
            found[node] = _value(node, [found[operand] for operand in _operands(node)])
    known = found[root]
    return known is not None and math.isnan(known[0])


def _operands(node: Expr) -> tuple[Expr, ...]:
    match node:
        case Cast(arg=arg):
            return (arg,)
        case Op(args=args):
            return args
        case Select(condition=condition, then=then, other=other):
            return condition, then, other
        case _:
            return ()


def _value(node: Expr, operands: list[Known | None]) -> Known | None:
    match node, operands:
        case Const(value=value), _:
            return float(value), True
        case Cast(dtype=dtype), [(value, certain)]:
            return _converted(value, certain, dtype)
        case Select(), [(condition, True), then, other]:
            return then if condition else other
        case Select(), [_, (a, sure), (b, certain)] if a == b or (math.isnan(a) and math.isnan(b)):
            return a, sure and certain
        case Op(name="and" | "or" as name), _ if node.dtype is BOOL:
            return _decided(name == "or", operands)
        case Op(name="not"), [(value, True)] if node.dtype is BOOL:
            return float(not value), True
        case Op(name=name), _ if name in _COMPARISONS or name in ("isnan", "isinf"):
            return _compared(name, operands)
        case Op(name=name), _ if name in _ARITHMETIC:
            return _computed(name, operands)
    return None


def _converted(value: float, certain: bool, dtype: DType) -> Known | None:
    """Return a number as another type has it."""
    if dtype is BOOL:
        return (float(value != 0), True) if certain else None
    kept = value in _EXACT or (dtype.is_float and not math.isfinite(value))
    return (value, certain) if kept else None


def _decided(by: bool, operands: list[Known | None]) -> Known | None:
    """Return a conjunction, which one false operand decides; a disjunction if a true one does."""
    if any(known is not None and bool(known[0]) is by for known in operands):
        return float(by), True
    return None if None in operands else (float(not by), True)


def _compared(name: str, operands: list[Known | None]) -> Known | None:
    """Return the result of a comparison, or a question, of numbers that are certain."""
    if not all(known is not None and known[1] for known in operands):
        return None
    values = [known[0] for known in operands if known is not None]
    decide = _COMPARISONS[name] if name in _COMPARISONS else getattr(math, name)
    return float(decide(*values)), True


def _computed(name: str, operands: list[Known | None]) -> Known | None:
    """Return a result of arithmetic: NaN prevails, and an infinity beside an unknown term."""
    known = [one for one in operands if one is not None]
    if any(math.isnan(value) for value, _ in known):
        return math.nan, True
    if len(known) < len(operands):
        prevailing = () if name == "sub" and operands[0] is None else _PREVAILING.get(name, ())
        return next(((value, False) for value, _ in known if value in prevailing), None)
    result = _ARITHMETIC[name](*(value for value, _ in known))
    if result is None or (math.isfinite(result) and result not in _EXACT):
        return None
    return result, math.isnan(result) or all(certain for _, certain in known)
