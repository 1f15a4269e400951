"""Find floats that are made of some bits of a byte, to print each as one call.

A byte holds two weights of 4 bits, or four of 2. Each alone would be a shift or a mask, a
subtraction and a conversion. As the last bits of a float they count as whole numbers with one
exponent: where all bits of the exponent are set, a mask leaves both, and what is left is a
subtraction. The fields of one byte share the first step (``f_field`` of ``prelude.h``).

Worked example, b a byte that was loaded, widened to w: ``t = w >> 4; u = t - 8; v = f32(u)`` is
``f_field<240, 8>(w)``, without t and u.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusec.ir.dtype import F32, U8, compute_type
from fusec.ir.expr import Cast, Const, Expr, Load, Op, Var
from fusec.ir.program import Let, Statement, reads, statements


@dataclass(frozen=True, slots=True)
class Field:
    """``f32((word >> n) - zero)`` of the bits of a word under a mask, whose lowest bit is n."""

    word: Var
    mask: int
    zero: int


def fields(body: Iterable[Statement]) -> dict[Var, Field | None]:
    """Return the values of statements that are fields; None for those that only fields read."""
    inside = list(statements(body))
    lets = {s.var: s.value for s in inside if isinstance(s, Let)}
    made = {var: field for var in lets if (field := _field(var, lets)) is not None}
    found: dict[Var, Field | None] = {**made}
    needed: set[Expr] = {field.word for field in made.values()}
    for statement in reversed(inside):
        match statement:
            case Let(var=var) if var in made:
                continue
            case Let(var=var, value=Op(name="and" | "shr" | "sub")) if made and var not in needed:
                found[var] = None
            case _:
                needed.update(reads(statement))
    return found


def is_widening(value: Expr) -> bool:
    """Return True for a cast to the type that the registers of its argument have."""
    return isinstance(value, Cast) and compute_type(value.arg.dtype) is value.dtype


def _field(var: Var, lets: Mapping[Var, Expr]) -> Field | None:
    match lets[var]:
        case Cast(dtype=dtype, arg=Var() as bits) if dtype is F32:
            zero = 0
            match lets.get(bits):
                case Op(name="sub", args=(Var() as inner, Const(value=number))):
                    bits, zero = inner, int(number)
            word, mask = _masked(bits, lets)
            if _is_byte(word, lets) and 0 < mask < 255 and 0 <= zero <= 255:
                return Field(word, mask, zero)
    return None


def _masked(bits: Var, lets: Mapping[Var, Expr]) -> tuple[Var, int]:
    """Return a byte and a mask if bits are ``byte >> n`` or the last ones of that; else no mask."""
    last, at = 255, 0
    match lets.get(bits):
        case Op(name="and", args=(Var() as inner, Const(value=number))):
            bits, last = inner, int(number)
    match lets.get(bits):
        case Op(name="shr", args=(Var() as inner, Const(value=number))):
            bits, at = inner, int(number)
    run = last >= 0 and last & last + 1 == 0 and at >= 0
    return bits, last << at & 255 if run else 0


def _is_byte(word: Var, lets: Mapping[Var, Expr]) -> bool:
    match lets.get(word):
        case Cast(arg=Var() as byte) as value:
            loaded = lets.get(byte)
            return is_widening(value) and isinstance(loaded, Load) and loaded.dtype is U8
    return False
