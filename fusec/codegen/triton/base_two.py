"""Rewrite exponentials to base two: ``exp(k*x - r)`` becomes ``exp2(x*(k*L) - r*L)``.

GPUs have an instruction for ``exp2`` alone. With L, the logarithm of e to base 2, folded into the
factor of the scores and into the row's maximum, an exponential in an attention's loop is one
multiply-add and that instruction, without two multiplications and a subtraction.

The loop of an attention's forward that keeps its logsumexp, with 128 x 64 tiles of D 128, has 1138
instructions instead of 1420 (sm_90, Triton 3.7.1, 2026-11).

Only values that may be computed by an approximate form are rewritten (see ``precision.py``): the
exponent is rounded once instead of twice, and at another operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from fusec.ir.dtype import F32
from fusec.ir.expr import Const, Dot, Expr, Load, Op, Select, Var, children, reach
from fusec.ir.names import Names
from fusec.ir.online import unscaled
from fusec.ir.program import Carry, Let, Program, Statement, map_statements, statements

LOG2_E = math.log2(math.e)
HUGE = 2.0**27
"""Magnitude of a row's maximum above which its scores are not multiplied by L.

A row whose scores are all masked, by -1e9 or by the least number of a type, is uniform: each score
minus the maximum is 0. Multiplied by L, both may overflow; and a multiply-add rounds only one of
the two products, which leaves an error of 64 for -1e9. Without L the difference is 0, too; any
other difference is at least 8 then, and both ``e**-8`` and ``2**-8`` are negligible.

Only scores that a constant or memory masks can be such (``_may_be_huge``): masks by minus infinity
are that with L, too, and the factors of each row take registers: 32 of a thread in the gradient of
64 x 64 keys and queries.
"""


def base_two(program: Program, approximate: frozenset[Var]) -> Program:
    """Return the program with approximate exponentials as powers of two.

    If the exponent is a tile minus a value with fewer lanes, both operands are scaled by L.
    """
    named = [s for s in statements(program.body) if isinstance(s, Let | Carry)]
    names = Names(s.var.name for s in named)
    values: dict[Expr, Expr] = {s.var: s.value for s in named if isinstance(s, Let)}

    def rewritten(statement: Statement) -> list[Statement]:
        lets: list[Statement] = []

        def let(name: str, value: Expr) -> Var:
            var = Var(names.new(f"v_{name}"), value.dtype, value.axes)
            lets.append(Let(var, value))
            return var

        match statement:
            case Let(var=var, value=Op(name="exp", args=(Var() as power,))) if var in approximate:
                value = Op("exp2", (_exponent(power, values, let),))
                return [*lets, Let(var, value)]
        return [statement]

    return replace(program, body=map_statements(program.body, rewritten))


def _exponent(power: Var, values: Mapping[Expr, Expr], let: Callable[[str, Expr], Var]) -> Var:
    """Return an exponent of e times L; ``let`` names the values that it is computed from."""
    match values.get(power):
        case Op(name="sub", args=(Var() as score, Var() as base)) if base.axes < score.axes:
            value, factor = _unscaled(score, values)
            by: Expr = Const(factor * LOG2_E, F32)
            logarithm: Expr = Const(LOG2_E, F32)
            if _may_be_huge(value, values):
                huge = let("huge", Op("gt", (let("size", Op("abs", (base,))), Const(HUGE, F32))))
                by = let("factor", Select(huge, Const(factor, F32), by))
                logarithm = let("log2_e", Select(huge, Const(1.0, F32), logarithm))
            scaled = let("score", Op("mul", (value, by))), let("base", Op("mul", (base, logarithm)))
            return let("power", Op("sub", scaled))
    value, factor = _unscaled(power, values)
    return let("power", Op("mul", (value, Const(factor * LOG2_E, F32))))


def _may_be_huge(score: Expr, values: Mapping[Expr, Expr]) -> bool:
    """Return True if a score is computed from a huge constant, or from memory but by products."""

    def operands(value: Expr) -> tuple[Expr, ...]:
        match values.get(value):
            case None | Dot() | Load():
                return ()
            case Select(then=a, other=b):
                return a, b
            case found:
                return children(found)

    def is_huge(value: Expr) -> bool:
        match values.get(value, value):
            case Const(value=number):
                return HUGE / 128 < abs(number) < math.inf  # masks may be added to each other
            case Load() | Var():  # of a value that loops carry nothing is known
                return True
        return False

    return any(map(is_huge, reach((score,), operands)))


def _unscaled(value: Var, values: Mapping[Expr, Expr]) -> tuple[Var, float]:
    """Return x and k if a value is ``x*k`` with a constant k, else the value and 1."""
    inner, (kind, k) = unscaled(values.get(value, value))
    if isinstance(inner, Var) and inner.axes == value.axes:
        return inner, k if kind == "mul" else 1 / k
    return value, 1.0
