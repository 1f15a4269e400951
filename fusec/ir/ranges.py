"""Ranges of values that are integers, whatever their type: what an int8, a nibble, a mask can be.

A range is the least and the greatest value, both included, of an expression whose values are all
finite integers; floats count if they are such. So a rounding is known to change nothing: bf16 holds
every integer up to 256, f16 up to 2048, f32 up to 2^24. A float that is loaded has no range: it may
have a fraction, or be NaN. Neither has an integer that may have wrapped.

A product of narrow floats has as many bits as both: one of 8 bits and a power of two has 4, which
bf16 holds with the exponents of f32, down to 2^-133.

Worked example: ``(b & 15) - 8`` of a byte b is in ``[-8, 7]``, so ``round_bf16(f32((b & 15) - 8))``
is ``f32((b & 15) - 8)``.
"""

from __future__ import annotations

import weakref
from typing import TypeAlias

from fusec.ir.dtype import BF16, BOOL, E2M1, F8, F16, F32, F64, DType, Kind
from fusec.ir.expr import Cast, Const, Expr, Load, Op, Select, reach
from fusec.ir.scalar import ROUND

Range: TypeAlias = tuple[int, int]

EXACT: dict[DType, int] = {BF16: 1 << 8, F16: 1 << 11, F32: 1 << 24, F64: 1 << 53}
"""Float type -> the integer up to which it holds all, of either sign."""

_ROUNDS = {ROUND[kind]: kind for kind in (BF16, F16)}
_NARROW = {name: kind for kind, name in ROUND.items()}
_KEPT = ("floor", "ceil", "trunc", "round", "within", "nonzero")
_known: weakref.WeakKeyDictionary[Expr, Range | None] = weakref.WeakKeyDictionary()


def integer_range(root: Expr) -> Range | None:
    """Return the least and the greatest value of an integer, or None if it may be none."""
    for node in reach((root,), _unknown):
        if node not in _known:
            _known[node] = _fitting(_range(node), node.dtype)
    return _known[root]


def holds(kind: DType, value: Expr) -> bool:
    """Return True if a float type holds a value exactly: an integer, or in bf16 a product."""
    found = integer_range(value)
    if found is not None:
        return _is_exact(found, kind)
    bits = _bits(value) if kind is BF16 else None
    return bits is not None and 1 << bits <= EXACT[BF16]


def unrounded(value: Expr) -> Expr:
    """Return a value without the roundings that do not change it."""
    while isinstance(value, Op) and (kind := _NARROW.get(value.name)) is not None:
        (inner,) = value.args
        if not holds(kind, inner) and not (isinstance(inner, Cast) and inner.arg.dtype is kind):
            break
        value = inner
    return value


def _bits(value: Expr) -> int | None:
    """Return the bits of a product of floats of 8 and 4 bits, without exponents; None otherwise."""
    match value:
        case Op(name=name, args=(inner,)) if name in _NARROW:
            kind = _NARROW[name].format
            assert kind is not None
            bits = _bits(inner)
            return None if bits is None else min(bits, kind.mantissa + 1)
        case Cast(arg=Load(dtype=kind)) if kind in F8 and kind.format is not None:
            return kind.format.mantissa + 1
        case Op(name="e2m1"):
            return E2M1.mantissa + 1
        case Op(name="mul", args=(a, b)):
            parts = _bits(a), _bits(b)
            return None if None in parts else sum(part or 0 for part in parts)
        case _:
            return None


def fits(kind: DType, value: Expr) -> bool:
    """Return True if an integer type holds all that an integer may be, so that none wraps."""
    found, whole = integer_range(value), _of_type(kind)
    return value.dtype.is_integer and _lies_in(found, whole)


def _lies_in(found: Range | None, whole: Range | None) -> bool:
    return bool(found and whole and whole[0] <= found[0] and found[1] <= whole[1])


def _unknown(node: Expr) -> tuple[Expr, ...]:
    if node in _known:
        return ()
    match node:
        case Op(args=args):
            return args
        case Cast(arg=arg):
            return (arg,)
        case Select(then=then, other=other):
            return (then, other)
        case _:
            return ()


def _is_exact(found: Range, kind: DType) -> bool:
    return kind in EXACT and max(map(abs, found)) <= EXACT[kind]


def _fitting(found: Range | None, kind: DType) -> Range | None:
    """Return a range if a type holds all of it: else the value was rounded, or wrapped."""
    whole = _of_type(kind)
    if whole is None:
        return found if found and _is_exact(found, kind) else None
    return found if _lies_in(found, whole) else whole


def _of_type(kind: DType) -> Range | None:
    """Return the range of an integer type's values; None for other types."""
    if kind is BOOL:
        return 0, 1
    if kind.kind is Kind.UNSIGNED:
        return 0, (1 << 8 * kind.itemsize) - 1
    half = 1 << 8 * kind.itemsize - 1
    return (-half, half - 1) if kind.kind is Kind.SIGNED else None


def _range(node: Expr) -> Range | None:
    """Return the range of a node in exact arithmetic, from those of its operands."""
    match node:
        case Const(value=value):
            return (int(value), int(value)) if float(value).is_integer() else None
        case Cast(arg=arg):
            return _known[arg]
        case Select(then=then, other=other):
            return _joined(_known[then], _known[other])
        case Op(name=name, args=args):
            found = [_known[arg] for arg in args]
            parts = [part for part in found if part is not None]
            return _of_operation(name, *parts) if len(parts) == len(found) else None
        case _:
            return None


def _joined(a: Range | None, b: Range | None) -> Range | None:
    return (min(a[0], b[0]), max(a[1], b[1])) if a and b else None


def _of_operation(name: str, a: Range, b: Range = (0, 0)) -> Range | None:
    """Return the range of an operation; None for those that are not known here."""
    match name:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            ends = [x * y for x in a for y in b]
            return min(ends), max(ends)
        case "neg":
            return -a[1], -a[0]
        case "abs":
            return max(a[0], -a[1], 0), max(map(abs, a))
        case "minimum" | "maximum":
            pick = min if name == "minimum" else max
            return pick(a[0], b[0]), pick(a[1], b[1])
        case "and" if a[0] >= 0 or b[0] >= 0:
            return 0, min(part[1] for part in (a, b) if part[0] >= 0)
        case "or" | "xor" if a[0] >= 0 and b[0] >= 0:
            return 0, (1 << max(a[1], b[1]).bit_length()) - 1
        case "shr" if b[0] >= 0 and b[1] < 32:
            return min(x >> y for x in a for y in b), max(x >> y for x in a for y in b)
        case "shl" if b[0] >= 0 and b[1] < 32:
            return min(x << y for x in a for y in b), max(x << y for x in a for y in b)
        case _ if name in _KEPT or name in _ROUNDS:
            return a
        case _:
            return None
