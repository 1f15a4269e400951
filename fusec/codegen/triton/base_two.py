"""Exponentials by the processor's own base: ``exp(k*x - r)`` as ``exp2(x*(k*L) - r*L)``.

A GPU computes powers of two. With L, the logarithm of e to base 2, folded into the factor of the
scores, and into what a row subtracts, an exponential in an attention's loop is one multiply-add and
one instruction of the special unit, where there were two multiplications and a subtraction.

Of an attention's forward that keeps its logsumexp, 128 x 64 tiles of D 128: 1138 instructions where
there were 1420 (sm_90, Triton 3.7.1, 2026-11).

Only of values that may be computed by an approximate form (see ``precision.py``): the exponent is
rounded once where it was rounded twice, at another place.
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
"""The size of what a row subtracts from which on its scores are not multiplied by L.

A row whose scores are all masked, by -1e9 or by the least number of a type, is uniform: each score
less the maximum is 0. Times L, both may be infinite; and a multiply-add leaves what it rounds of
the one but not of the other, which is 64 for -1e9. Without L the difference is 0, too; any other is
at least 8 then, and both ``e**-8`` and ``2**-8`` are next to nothing.
"""


def base_two(program: Program, approximate: frozenset[Var]) -> Program:
    """Return the program with approximate exponentials as powers of two.

    Of a difference between a tile and what has fewer lanes, both are multiplied before.
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
        """Return the steps of an approximate exponential as a power of two; others as they are."""
        match statement:
            case Let(var=var, value=Op(name="exp", args=(Var() as power,))) if (
                var in self.approximate
            ):
                lets = self.power(power)
                return (*lets, Let(var, Op("exp2", (lets[-1].var,))))
            case _:
                return (statement,)

    def power(self, power: Var) -> tuple[Let, ...]:
        """Return the steps of a power of e as one of two, which is the last."""
        match self.values.get(power):
            case Op(name="sub", args=(Var() as score, Var() as base)) if base.axes < score.axes:
                return self.difference(score, base)
            case _:
                value, factor = self.unscaled(power)
                return (self.let("power", Op("mul", (value, Const(factor * LOG2_E, F32))), value),)

    def difference(self, score: Var, base: Var) -> tuple[Let, ...]:
        """Return the steps of ``score*(k*L) - base*L``, which is the last."""
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
        """Return the steps of k*L and of L, the last two: without L in rows of huge numbers."""
        size = self.let("size", Op("abs", (base,)), base)
        huge = self.let("huge", Op("gt", (size.var, Const(HUGE, F32))), base)
        pair = (("factor", factor), ("log2_e", 1.0))
        chosen = (
            self.let(name, Select(huge.var, Const(k, F32), Const(k * LOG2_E, F32)), base)
            for name, k in pair
        )
        return (size, huge, *chosen)

    def unscaled(self, value: Var) -> tuple[Var, float]:
        """Return what a value is a multiple of, if it has been multiplied, and the factor."""
        given = self.values.get(value)
        if given is not None:
            inner, (kind, k) = unscaled(given)
            if isinstance(inner, Var) and inner.axes == value.axes:
                return inner, k if kind == "mul" else 1 / k
        return value, 1.0

    def let(self, name: str, value: Expr, like: Var) -> Let:
        self.serial += 1
        return Let(Var(self.names.new(f"v_{name}"), value.dtype, like.axes, self.serial), value)
