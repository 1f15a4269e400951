"""Write the values of definitions over unified axes, with internal loads substituted.

``unify`` maps each axis to finest axes; here each definition's expression is rewritten over these,
with the values of its producers in the place of its internal loads, and simplified. The result
depends only on the expression, on the resolved axes and on the producers' values. So ``Learned``
memoises it across unifications: fusion tries each neighbour of a group in turn, and a kernel of
fifty definitions that grows by one resolves one.

Worked example: with ``mu[m] = sum(c': x[m, c'])/C`` internal and c' united with c, ``y[m, c] = x[m,
c] - mu[m]`` has the value ``x[m, c] - sum(c: x[m, c])/C``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from fusec.ir.expr import Buffer, Cast, Expr, Load, Op, loads, reductions, substitute_all
from fusec.ir.graph import Def
from fusec.ir.index import Axis, Index, floordiv, index, mod
from fusec.ir.rewrite import Normalizer, read_at, rewrite, with_guard
from fusec.ir.scalar import ROUND
from fusec.passes.graph.reduction_rules import AXIS_RULES
from fusec.passes.graph.simplify import rounding_dropper, simplifier


class Rejection(Exception):
    """The definitions may not share a kernel; ``reason`` says why, for the decision log.

    Attributes:
        parts: the reason as strings and buffers, so that it applies to groups of the same form.
    """

    def __init__(self, *parts: str | Buffer) -> None:
        super().__init__(*parts)
        self.parts = parts

    @property
    def reason(self) -> str:
        """Return why, in words."""
        return "".join(p.name if isinstance(p, Buffer) else p for p in self.parts)

    def __str__(self) -> str:
        return self.reason


_Places: TypeAlias = tuple[Index, ...]
_Seen: TypeAlias = tuple[Expr, _Places]
"""A definition's value as its consumers in the kernel see it, and the index of each of its axes."""


@dataclass(slots=True, eq=False)
class Learned:
    """Memo of resolved values that unifications share.

    It shares the axes that a cut creates, too. Their serial numbers then depend on the order of the
    unifications, which would show in names and loops. So a kernel with such axes is unified once
    more, with an empty memo, before it is printed.

    Attributes:
        cuts: (axis, extent of its inner part) -> the (outer, inner) axes that it is cut into.
        values: inputs of ``resolve_values`` for one definition -> its value in memory, and its
            value for consumers in the kernel.
        inlined: (load, producer's value, its indices) -> the expression that replaces the load.
    """

    cuts: dict[tuple[Axis, Index], tuple[Axis, Axis]] = field(default_factory=dict)
    values: dict[tuple[object, ...], tuple[Expr, Expr]] = field(default_factory=dict)
    inlined: dict[tuple[Load, Expr, _Places], Expr] = field(default_factory=dict)
    simplify: Normalizer = field(default_factory=lambda: simplifier(AXIS_RULES))
    drop_rounding: Callable[[tuple[Expr, ...]], tuple[Expr, ...]] = field(
        default_factory=rounding_dropper
    )


def resolve_values(
    defs: Iterable[Def],
    live_out: frozenset[Buffer],
    resolve: Callable[[Index], Index],
    learned: Learned,
) -> dict[Buffer, Expr]:
    """Return buffer -> its value, over unified axes and without loads of each other.

    Args:
        defs: definitions in execution order.
        live_out: stored buffers, whose consumers see the rounded value.
        resolve: maps an index to the finest axes.
    Raises:
        Rejection: if a definition is loaded at an index where it cannot be computed.
    """
    seen: dict[Buffer, _Seen] = {}
    made: dict[Buffer, Expr] = {}
    for line in defs:
        axes = axes_of_line(line.axes, line.expr)
        here = [index(axis) for axis in axes]
        where = tuple(map(resolve, here))
        read = tuple([(b, *seen[b]) for b in line.reads if b in seen])
        stored = line.buffer in live_out
        key = (line.axes, line.expr, where, read, stored)
        known = learned.values.get(key)
        if known is None:
            moved = {a: w for a, h, w in zip(axes, here, where, strict=True) if w is not h}
            expr = _inlined(line.expr.substitute(moved), seen, learned)
            value = learned.drop_rounding(learned.simplify((expr,)))[0]
            known = learned.values[key] = value, _rounded(expr) if stored else expr
        made[line.buffer], visible = known
        seen[line.buffer] = visible, where[: len(line.axes)]
    return made


@functools.lru_cache(maxsize=1 << 13)
def axes_of_line(axes: tuple[Axis, ...], expr: Expr) -> tuple[Axis, ...]:
    """Return the axes of a definition and those that its reductions bind, once each."""
    return tuple(dict.fromkeys((*axes, *bound_axes(expr))))


@functools.lru_cache(maxsize=1 << 13)
def bound_axes(expr: Expr) -> tuple[Axis, ...]:
    """Return the axes that reductions in an expression bind."""
    return tuple(a for n in reductions(expr) for a in n.over)


@functools.lru_cache(maxsize=1 << 13)
def loads_of(expr: Expr) -> tuple[Load, ...]:
    """Return the distinct loads in an expression, memoised."""
    return tuple(loads((expr,)))


@functools.lru_cache(maxsize=4096)
def digits(value: Index) -> tuple[Axis, ...] | None:
    """Return the axes of a mixed-radix index, slowest first, or None if it is anything else."""
    found: list[Axis] = []
    step, rest, left = index(1), value, set(value.axes)
    while left:
        axis = next((a for a in left if value.coefficient(a) is step), None)
        if axis is None:
            return None
        left.remove(axis)
        found.append(axis)
        rest = rest - step * index(axis)
        step = step * axis.extent
    return tuple(found[::-1]) if rest is index(0) else None


def _inlined(expr: Expr, seen: Mapping[Buffer, _Seen], learned: Learned) -> Expr:
    """Return an expression with its internal loads replaced by the producers' values."""

    def inlined(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in seen:
            return node
        body, own = seen[node.buffer]
        key = (node, body, own)
        value = learned.inlined.get(key)
        if value is None:
            if own != node.indices:
                body = _recompute(body, own, node.indices, node.buffer)
            body = read_at(body, node.indices)
            value = learned.inlined[key] = with_guard(body, node.guard)
        return value

    return rewrite((expr,), inlined)[0]


def _recompute(body: Expr, own: _Places, wanted: _Places, buffer: Buffer) -> Expr:
    """Return a producer's value recomputed at the indices ``wanted`` instead of its own."""
    mapping: dict[Axis, Index] = {}
    for have, want in zip(own, wanted, strict=True):
        found = digits(have)
        if found is None:
            raise Rejection(buffer, " is read at a computed index")
        rest = want
        for axis in found[::-1]:
            if axis.limit is not None:
                raise Rejection(buffer, " is read at another index along a ragged axis")
            value = mod(rest, axis.extent) if len(found) > 1 else rest
            if value.as_axis() is not axis:
                mapping[axis] = value
            rest = floordiv(rest, axis.extent)

    fixed: dict[Expr, Expr] = {node: node for node in reductions(body)}
    if any(not node.axes.isdisjoint(mapping) for node in fixed):
        raise Rejection(buffer, " would be reduced again at another index")
    return substitute_all((body,), mapping, fixed)[0]


def _rounded(expr: Expr) -> Expr:
    """Return a stored 16-bit value as its consumers see it: with the rounding made explicit."""
    if isinstance(expr, Cast) and expr.dtype in ROUND and expr.arg.dtype.name == "f32":
        return Cast(Op(ROUND[expr.dtype], (expr.arg,)), expr.dtype)
    return expr
