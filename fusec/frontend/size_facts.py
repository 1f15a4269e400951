"""Facts that a ShapeEnv has proven about its symbols: divisors, bounds, traced values.

They come from the trace's guards, which Dynamo checks before a call, such as ``s0 % 4 == 0`` or
``s0 == s1*(s0//s1)``. Nothing here evaluates a condition, which would add a guard.

Assumes: torch's expressions are sympy's, over the integer symbols of one ShapeEnv.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]

from fusec.errors import Unsupported
from fusec.torch_interior import FloorDiv, SingletonInt

UNSEEN = 1024
"""The hint of a size that has no traced value (``mark_unbacked``)."""


class SizeFacts:
    """The facts of one ShapeEnv, as of the time of construction."""

    def __init__(self, env: Any) -> None:
        self._env = env
        # On data-dependent sizes, by the last symbol of each.
        deferred: dict[Any, Any] = getattr(env, "deferred_runtime_asserts", {})
        self._asserted = [a.expr for known in deferred.values() for a in known if _is_relation(a)]
        guards = [g.expr for g in env.guards if _is_relation(g)]
        self._equal = [
            tuple(map(env.replace, relation.args))
            for relation in (*guards, *self._asserted)
            if isinstance(relation, sympy.Eq)
        ]
        self._pairs = set(_exact_divisions(env, self._equal))
        self._chosen = dict(_choices(self._equal))
        self._fixed = [(a, b) for a, b in self._equal if a.is_Integer or b.is_Integer]

    def value(self, symbol: sympy.Symbol, given: Collection[str] = ()) -> sympy.Expr | None:
        """Return an expression of other symbols that equals a symbol, None if none is known.

        ShapeEnv itself replaces no symbols of data, nor any by an expression that divides.

        Args:
            given: names of symbols whose values are known earlier; traced values always are.
        """
        found = [b if a == symbol else a for a, b in self._equal if symbol in (a, b)]
        known = (e for e in found if symbol not in e.free_symbols and _only_divides(e))
        return min((e for e in known if self._are_given(e, given)), key=str, default=None)

    def bounds(self, symbol: sympy.Symbol, given: Collection[str]) -> list[sympy.Expr]:
        """Return upper bounds of a data-dependent symbol, as expressions of given symbols."""
        found: list[sympy.Expr] = []
        for relation in self._asserted:
            if isinstance(relation, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt):
                strict = isinstance(relation, sympy.Lt | sympy.Gt)
                excess = sympy.expand(self._env.replace(relation.lts - relation.gts)) + int(strict)
                if excess.coeff(symbol, 1) == 1 and symbol not in (excess - symbol).free_symbols:
                    found.append(symbol - excess)
        return [e for e in found if e.free_symbols and self._are_given(e, given)]

    def _are_given(self, expr: sympy.Expr, given: Collection[str]) -> bool:
        return all(s.name in given or self.was_seen(s) for s in expr.free_symbols)

    def divisor(self, symbol: sympy.Symbol) -> sympy.Expr | None:
        """Return a known exact divisor of a symbol, None if there is none.

        An expression of other symbols if one is known, else the common multiple of the numbers.
        """
        known = [b for a, b in self._pairs if a == symbol and symbol not in b.free_symbols]
        symbolic = sorted((b for b in known if b.free_symbols), key=str)
        if symbolic:
            return symbolic[0]
        common = math.lcm(*map(int, known))
        return None if common == 1 else sympy.Integer(common)

    def divides(self, dividend: sympy.Expr, divisor: sympy.Expr) -> bool:
        """Return True if the quotient of two expressions is known to be exact."""
        return (dividend, divisor) in self._pairs

    def chosen(self, expr: sympy.Expr) -> sympy.Expr | None:
        """Return the argument that a ``Min`` or ``Max`` always equals, None if not known.

        Rows ``table[:s]`` of a table of 12 are ``Min(12, s)``, which is s where they are added to s
        others.
        """
        return self._chosen.get(expr)

    def number(self, expr: sympy.Expr) -> int | None:
        """Return the number that an expression of sizes always equals, None if none is known.

        ``s - (s + 1)//2`` may be guarded to be 1, where an axis of that extent is broadcast.
        """
        for a, b in self._fixed:
            if expr.free_symbols != (a - b).free_symbols:
                continue
            for difference in (expr - (a - b), expr + (a - b)):
                rest = sympy.expand(difference)
                if rest.is_Integer:
                    return int(rest)
        return None

    def fixed(self, symbols: set[sympy.Symbol]) -> list[tuple[sympy.Expr, ...]]:
        """Return the known equations of an expression and a number, over these symbols alone."""
        return [pair for pair in self._fixed if (pair[0] - pair[1]).free_symbols <= symbols]

    def ends(self, symbol: sympy.Symbol) -> tuple[int | None, int | None]:
        """Return a lower and an upper bound of a symbol's values, None where there is none."""
        bounds = self._env.var_to_range.get(symbol)
        return (None, None) if bounds is None else (_finite(bounds.lower), _finite(bounds.upper))

    def was_seen(self, symbol: sympy.Symbol) -> bool:
        """Return True if a symbol has a traced value, for which the trace's guards hold."""
        return self._seen(symbol) is not None

    def is_ragged(self, symbol: sympy.Symbol) -> bool:
        """Return True for a ragged extent of a nested tensor: it stands for several lengths."""
        return isinstance(self._seen(symbol), SingletonInt)

    def hint(self, symbol: sympy.Symbol) -> int:
        """Return a symbol's traced value, or ``UNSEEN`` within its bounds where it has none.

        Raises:
            Unsupported: for a ragged extent, which has no value.
        """
        if self.is_ragged(symbol):
            raise Unsupported("a size of a nested tensor")
        value, (_, most) = self._seen(symbol), self.ends(symbol)
        guess = UNSEEN if most is None else max(1, min(UNSEEN, most))
        return guess if value is None else int(value)

    def _seen(self, symbol: sympy.Symbol) -> Any:
        values = getattr(self._env, "backed_var_to_val", None)
        return (self._env.var_to_val if values is None else values).get(symbol)


def facts_of(symbols: set[sympy.Symbol], env: Any) -> str:
    """Return the facts that code for some symbols depends on, as text for a key."""
    facts = SizeFacts(env)
    ordered = sorted(symbols, key=str)
    names = [s.name for s in ordered]
    alone = [(s.name, *map(str, (*facts.ends(s), facts.divisor(s)))) for s in ordered]
    others = [(str(facts.value(s, names)), str(facts.bounds(s, names))) for s in ordered]
    chosen = [(e, c) for e, c in facts._chosen.items() if e.free_symbols <= symbols]
    exact = [(a, b) for a, b in facts._pairs if not a.is_Symbol and (a * b).free_symbols <= symbols]
    return str((alone, others, sorted(map(str, (*facts.fixed(symbols), *chosen, *exact)))))


def _finite(bound: sympy.Expr) -> int | None:
    """Return a bound as an int, None if it is infinite or beyond 2**40."""
    number = int(bound) if isinstance(bound, int | sympy.Integer) else None
    return number if number is not None and abs(number) < 1 << 40 else None


def _only_divides(expr: sympy.Expr) -> bool:
    return all(isinstance(part, FloorDiv) for part in expr.atoms(sympy.core.function.Application))


def _is_relation(known: Any) -> bool:
    return isinstance(known.expr, sympy.Rel)


def _choices(equal: Sequence[tuple[sympy.Expr, ...]]) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Yield each ``Min`` or ``Max`` that is known to equal one of its arguments, and that one."""
    for left, right in equal:
        for one, other in ((left, right), (right, left)):
            if type(one).__name__ in ("Min", "Max") and other in one.args:
                yield one, other


def _exact_divisions(
    env: Any, equal: Sequence[tuple[sympy.Expr, ...]]
) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Yield dividend and divisor of each division that is known to leave no remainder."""
    quotients: dict[sympy.Expr, sympy.Expr] = {}
    for left, right in equal:
        if isinstance(left, FloorDiv) and right.is_Integer:
            quotients[left] = right
        yield from _exact_in(left - right)
    for remainder in env.divisible:
        replaced = env.replace(remainder)
        if type(replaced).__name__ not in ("Mod", "PythonMod"):
            continue
        dividend, divisor = replaced.args
        yield dividend, divisor
        quotient = quotients.get(FloorDiv(dividend, divisor))
        if quotient is not None:
            yield from _exact_in(dividend - divisor * quotient)


def _exact_in(difference: sympy.Expr) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Yield (a, b) for each ``k*(a - b*(a//b))`` that a difference, known to be 0, equals."""
    for division in difference.atoms(FloorDiv):
        quotient = sympy.Dummy()
        expanded = sympy.expand(difference.xreplace({division: quotient}))
        factor, rest = expanded.coeff(quotient, 1), expanded.coeff(quotient, 0)
        dividend, divisor = division.args
        if factor != 0 and sympy.expand(rest * divisor + factor * dividend) == 0:
            yield dividend, divisor
