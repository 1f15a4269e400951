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
from dataclasses import replace

from fusec.ir.dtype import F32
from fusec.ir.expr import Const, Dot, Expr, Op, Select, Var
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
"""


def base_two(program: Program, approximate: frozenset[Var]) -> Program:
    """Return the program with approximate exponentials as powers of two.

    If the exponent is a tile minus a value with fewer lanes, both operands are scaled by L.
    """
    rewriter = _Rewriter(program, approximate)
    return replace(program, body=map_statements(program.body, rewriter.rewritten))


_NAMES = Let | Carry


class _Rewriter:
    def __init__(self, program: Program, approximate: frozenset[Var]) -> None:
        lets = [s for s in statements(program.body) if isinstance(s, Let)]
        self.approximate = approximate
        self.values: dict[Expr, Expr] = {s.var: s.value for s in lets}
        self.serial = max((s.var.serial for s in lets), default=0)
        self.names = Names(s.var.name for s in statements(program.body) if isinstance(s, _NAMES))

    def rewritten(self, statement: Statement) -> tuple[Statement, ...]:
        """Return an approximate exponential as statements with ``exp2``; others unchanged."""
        match statement:
            case Let(var=var, value=Op(name="exp", args=(Var() as power,))) if (
                var in self.approximate
            ):
                lets = self.power(power)
                return (*lets, Let(var, Op("exp2", (lets[-1].var,))))
            case _:
                return (statement,)

    def power(self, power: Var) -> tuple[Let, ...]:
        """Return statements that compute an exponent of e times L; the last defines it."""
        match self.values.get(power):
            case Op(name="sub", args=(Var() as score, Var() as base)) if base.axes < score.axes:
                return self.difference(score, base)
            case _:
                value, factor = self.unscaled(power)
                return (self.let("power", Op("mul", (value, Const(factor * LOG2_E, F32))), value),)

    def difference(self, score: Var, base: Var) -> tuple[Let, ...]:
        """Return statements that compute ``score*(k*L) - base*L``; the last defines it."""
        value, factor = self.unscaled(score)
        if isinstance(self.values.get(value), Dot):  # nothing is masked
            steps: tuple[Let, ...] = ()
            by: Expr = Const(factor * LOG2_E, F32)
            logarithm: Expr = Const(LOG2_E, F32)
        else:
            steps = self.factors(base, factor)
            by, logarithm = (s.var for s in steps[-2:])
        left = self.let("score", Op("mul", (value, by)), value)
        right = self.let("base", Op("mul", (base, logarithm)), base)
        return (*steps, left, right, self.let("power", Op("sub", (left.var, right.var)), value))

    def factors(self, base: Var, factor: float) -> tuple[Let, ...]:
        """Return statements whose last two define k*L and L, or k and 1 in rows above ``HUGE``."""
        size = self.let("size", Op("abs", (base,)), base)
        huge = self.let("huge", Op("gt", (size.var, Const(HUGE, F32))), base)
        pair = (("factor", factor), ("log2_e", 1.0))
        chosen = (
            self.let(name, Select(huge.var, Const(k, F32), Const(k * LOG2_E, F32)), base)
            for name, k in pair
        )
        return (size, huge, *chosen)

    def unscaled(self, value: Var) -> tuple[Var, float]:
        """Return x and k if a value is ``x*k`` with a constant k, else the value and 1."""
        given = self.values.get(value)
        if given is not None:
            inner, (kind, k) = unscaled(given)
            if isinstance(inner, Var) and inner.axes == value.axes:
                return inner, k if kind == "mul" else 1 / k
        return value, 1.0

    def let(self, name: str, value: Expr, like: Var) -> Let:
        self.serial += 1
        return Let(Var(self.names.new(f"v_{name}"), value.dtype, like.axes, self.serial), value)
