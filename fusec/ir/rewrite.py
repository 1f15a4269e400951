"""Rewriting expressions bottom-up, once per distinct node.

``rewrite(roots, rule)`` replaces each node, whose children are rewritten already, by the result of
``rule``. ``Normalizer`` applies a list of ``Rules`` until none changes anything. Both are memoised
on identity and iterative: deep chains are no problem.

Worked example: with the rule that ``x * 1`` is x, ``(a * 1) * 1`` becomes a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeGuard

from fusec.ir.definition import NOWHERE, Def
from fusec.ir.dtype import BOOL, I64
from fusec.ir.expr import (
    Buffer,
    Const,
    Expr,
    Load,
    Op,
    Reduce,
    Select,
    as_value,
    both,
    cast,
    children,
    index_of,
    loads,
    op,
    postorder,
    rebuild,
    reductions,
    select,
    substitute_all,
)
from fusec.ir.index import Axis, Index, Runtime, index, is_nonnegative
from fusec.ir.scalar import CHECKED

Rule: TypeAlias = Callable[[Expr], Expr]
"""Returns what replaces a node; the node itself where there is nothing to rewrite."""


class Rules:
    """An ordered list of rules, each with the kinds of nodes that it may rewrite.

    Args:
        rows: a rule, then classes of nodes or names of operations.
    """

    def __init__(self, *rows: tuple[Any, ...]) -> None:
        self.rows = rows
        self.of: dict[type | str, tuple[Rule, ...]] = {}
        for rule, *kinds in rows:
            for kind in kinds:
                self.of[kind] = (*self.of.get(kind, ()), rule)

    def __call__(self, node: Expr) -> Expr:
        """Return the result of the first rule that rewrites a node; the node if none does."""
        for rule in self.of.get(node.name if isinstance(node, Op) else type(node), ()):
            found = rule(node)
            if found is not node:
                return found
        return node


def rewrite(
    roots: tuple[Expr, ...], rule: Rule, known: dict[Expr, Expr] | None = None
) -> tuple[Expr, ...]:
    """Return the roots with ``rule`` applied to each node; the same objects if nothing changed.

    Args:
        known: node -> its result, of earlier calls; those of this call are added.
    """
    new = {} if known is None else known
    stack: list[tuple[Expr, tuple[Expr, ...] | None]] = [(r, None) for r in reversed(roots)]
    while stack:
        node, below = stack.pop()
        if node in new:
            continue
        if below is None:
            below = children(node)
            waiting = [(child, None) for child in below if child not in new]
            if waiting:
                stack.append((node, below))
                stack += waiting
                continue
        changed = any(new[child] is not child for child in below)
        new[node] = rule(rebuild(node, new, None) if changed else node)
    return tuple(new[root] for root in roots)


def replace_nodes(roots: tuple[Expr, ...], new: Mapping[Expr, Expr]) -> tuple[Expr, ...]:
    """Return the roots with the outermost nodes that are keys of ``new`` replaced."""
    return rewrite(roots, lambda node: node, dict(new))


class Normalizer:
    """Rewrite by a list of rules until none applies: what a rule returns is rewritten in its turn.

    Memoised across calls: a chain that grows by one operation per call costs one visit per call,
    not one for each operation in it.
    """

    __slots__ = ("new", "rule")

    def __init__(self, rules: Rules) -> None:
        self.rule = rules
        self.new: dict[Expr, Expr] = {}

    def __call__(self, roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return rewrite(roots, self._normal, self.new)

    def _normal(self, node: Expr) -> Expr:
        found = self.rule(node)
        self.new[node] = node if found is node else self((found,))[0]
        return self.new[node]


def reading(instead: Mapping[Buffer, Buffer]) -> Rule:
    """Return the rule that redirects loads of the buffers in ``instead``, at the same indices.

    The mapping is looked up when the rule runs, so that it may still grow.
    """

    def rule(node: Expr) -> Expr:
        if isinstance(node, Load) and node.buffer in instead:
            return Load(instead[node.buffer], node.indices, node.guard)
        return node

    return rule


def with_guard(expr: Expr, guard: Expr | None) -> Expr:
    """Return the value of ``expr`` where ``guard`` holds and 0 elsewhere, its loads guarded too.

    It replaces a guarded load when the buffer's definition is inlined.
    """
    if guard is None:
        return expr
    condition = guard
    # The points of an ordered reduction are those of a scan, whatever is read of it.
    kept: dict[Expr, Expr] = {n: n for n in reductions(expr) if n.monoid.ordered}
    if any(not condition.axes.isdisjoint(n.over) for n in reductions(expr)):
        # A reduction that does not vary along the guarded axes does not need the guard; one that
        # does gets fresh bound axes, or it would capture the guard's. So does a reduction that
        # varies along the bound axes that are replaced.
        varying = condition.axes | _bound_where(expr, condition.axes)
        kept |= {n: n for n in reductions(expr) if n.axes.isdisjoint(varying)}
        expr = fresh_bound_axes(expr, kept)

    body = guarded_loads(expr, condition, kept)
    if body.dtype is BOOL:
        return Op("and", (condition, body))
    return Select(condition, body, Const(0, body.dtype))


def guarded_loads(expr: Expr, condition: Expr, kept: Mapping[Expr, Expr]) -> Expr:
    """Return an expression that neither loads nor raises where a condition does not hold.

    Args:
        kept: node -> its result, for nodes that stay as they are.
    """
    # The condition itself is computed everywhere, so that its nodes stay as they are.
    checks = any(map(is_checked, postorder((expr,))))
    asked = frozenset(postorder((condition,))) if checks else frozenset[Expr]()

    def guarded(node: Expr) -> Expr:
        if node in asked:
            return node
        if isinstance(node, Load):
            return Load(node.buffer, node.indices, both(node.guard, condition))
        return checked_where(condition, node) if is_checked(node) else node

    return rewrite((expr,), guarded, dict(kept))[0]


def is_checked(node: Expr) -> TypeGuard[Op]:
    """Return True for an operation that may raise an error, which masked lanes must not do."""
    return isinstance(node, Op) and node.name in CHECKED


def checked_where(condition: Expr, node: Op) -> Op:
    """Return a checked operation that may raise its error only where ``condition`` holds."""
    value, *bounds = node.args
    safe = Select(condition, value, Const(CHECKED[node.name], node.dtype))
    return Op(node.name, (safe, *(_extent_where(condition, bound) for bound in bounds)))


def _extent_where(condition: Expr, extent: Expr) -> Expr:
    """Return an extent that is at least 1 where ``condition`` does not hold."""
    known = index_of(extent)
    if known is not None and is_nonnegative(known - 1):
        return extent
    return select(condition, extent, 1)


def read_at(expr: Expr, indices: Iterable[Index]) -> Expr:
    """Return ``expr``, inlined at some indices, with every gathered index checked for its range.

    A load checks its own indices. Where no load has the gathered index (positions, constants,
    broadcasts), or only one whose guard tests that index, a selection checks it::

        arange(n)[k]   is   where(within(k, n) >= 0, k, 0)
    """
    gathers = [a for i in indices for a in i.atoms() if isinstance(a, Runtime)]
    if not gathers:
        return expr
    checked = frozenset(_checked_by_loads(expr))
    for gather in dict.fromkeys(gathers):
        if gather not in checked:
            place = op("within", cast(gather.expr, I64), as_value(gather.extent))
            expr = select(op("ge", place, 0), expr, 0)
    return expr


def _checked_by_loads(expr: Expr) -> Iterator[Runtime]:
    for load in loads((expr,)):
        asked = () if load.guard is None else postorder((load.guard,))
        for atom in (a for i in load.indices for a in i.atoms()):
            if isinstance(atom, Runtime) and atom.expr not in asked:
                yield atom


def _bound_where(expr: Expr, axes: frozenset[Axis]) -> frozenset[Axis]:
    """Return the axes bound by those reductions that vary along ``axes``."""
    varying = (n for n in reductions(expr) if not n.axes.isdisjoint(axes))
    return frozenset(a for n in varying for a in n.over)


def fresh_bound_axes(expr: Expr, kept: Mapping[Expr, Expr]) -> Expr:
    """Return the expression with every reduction but those in ``kept`` over fresh axes."""

    def renamed(node: Expr) -> Expr:
        if not isinstance(node, Reduce):
            return node
        fresh = {a: Axis(a.name, a.extent, a.limit) for a in node.over}
        mapping = {a: index(b) for a, b in fresh.items()}
        bodies = substitute_all(node.bodies, mapping, kept)
        return Reduce(node.monoid, tuple(fresh.values()), *bodies)

    return rewrite((expr,), renamed, dict(kept))[0]


def inline_loads(line: Def, definitions: Mapping[Buffer, Def], simplify: Normalizer) -> Def:
    """Return a line with definitions inlined for its loads, at the loaded indices, simplified.

    Its origin includes those of the definitions.
    """
    sources = [definitions[buffer] for buffer in line.reads if buffer in definitions]
    if not sources:
        return line

    def inlined(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in definitions:
            return node
        known = definitions[node.buffer]
        pairs = zip(known.axes, node.indices, strict=True)
        mapping = {a: i for a, i in pairs if i.as_axis() is not a}
        return with_guard(read_at(known.expr.substitute(mapping), node.indices), node.guard)

    (expr,) = simplify(rewrite((line.expr,), inlined))
    origin = sum((known.origin for known in sources), NOWHERE) + line.origin
    return replace(line, expr=expr, origin=origin)


def is_index_only(expr: Expr) -> bool:
    """Return True if ``expr`` reads no memory: constants, index values and operations on them."""
    return not any(isinstance(node, Load) for node in postorder((expr,)))
