"""Exponentials by the processor's own base: ``exp(k*x - r)`` as ``exp2(x*(k*L) - r*L)``.

A GPU computes powers of two. With L, the logarithm of e to base 2, folded into the factor of the
scores, and into what a row subtracts, an exponential in an attention's loop is one multiply-add and
one instruction of the special unit, where there were two multiplications and a subtraction.

Of an attention's forward that keeps its logsumexp, 128 x 64 tiles of D 128: 1138 instructions where
there were 1420 (sm_90, Triton 3.7.1, 2026-11).

Only of values that may be computed by a cheap form (see ``precision.py``): the exponent is rounded
once where it was rounded twice, at another place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fusec.ir.dtype import F32
from fusec.ir.expr import Const, Expr, Op, Var
from fusec.ir.online import unscaled
from fusec.ir.program import For, Let, Program, Statement

LOG2_E = math.log2(math.e)


def base_two(program: Program, cheap: frozenset[Var]) -> Program:
    """Return the program with cheap exponentials as powers of two.

    Of a difference between a tile and what has fewer lanes, both are multiplied before.
    """
    rewriter = _Rewriter(program, cheap)
    return replace(program, body=tuple(rewriter.block(program.body)))


class _Rewriter:
    def __init__(self, program: Program, cheap: frozenset[Var]) -> None:
        lets = [s for s in _statements(program.body) if isinstance(s, Let)]
        self.cheap = cheap
        self.values: dict[Expr, Expr] = {s.var: s.value for s in lets}
        self.serial = max((s.var.serial for s in lets), default=0)

    def block(self, body: tuple[Statement, ...]) -> Iterator[Statement]:
        for statement in body:
            match statement:
                case For():
                    yield replace(statement, body=tuple(self.block(statement.body)))
                case Let(var=var, value=Op(name="exp", args=(power,))) if var in self.cheap:
                    yield from self.power_of_two(statement, power)
                case _:
                    yield statement

    def power_of_two(self, whole: Let, power: Expr) -> Iterator[Statement]:
        """Yield a cheap exponential as a power of two."""
        match self.values.get(power):
            case Op(name="sub", args=(Var() as score, Var() as base)) if base.axes < score.axes:
                left, right = self.scaled("score", score), self.scaled("base", base)
                exponent = self.let("power", Op("sub", (left.var, right.var)), score)
                yield from (left, right, exponent)
            case _ if isinstance(power, Var):
                exponent = self.scaled("power", power)
                yield exponent
            case _:
                yield whole
                return
        yield Let(whole.var, Op("exp2", (exponent.var,)))

    def scaled(self, name: str, value: Var) -> Let:
        """Return a value multiplied by L, in one step with the factor that it has already."""
        factor, given = LOG2_E, self.values.get(value)
        if given is not None:
            inner, (kind, k) = unscaled(given)
            if isinstance(inner, Var) and inner.axes == value.axes:
                value, factor = inner, factor * k if kind == "mul" else factor / k
        return self.let(name, Op("mul", (value, Const(factor, F32))), value)

    def let(self, name: str, value: Expr, like: Var) -> Let:
        self.serial += 1
        return Let(Var(f"v_{name}", value.dtype, like.axes, self.serial), value)


def _statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    for statement in body:
        yield statement
        if isinstance(statement, For):
            yield from _statements(statement.body)
