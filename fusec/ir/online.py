"""Sums that may run beside the maximum they refer to: the algebra of online softmax.

A sum over n of ``exp(s - m) * w`` with ``m = max(n: s)`` needs m before its first term. But
``exp(s - m') = exp(s - m) * exp(m - m')``: a sum of terms that are *linear* in ``exp(s - m)`` may
start with the maximum so far, and be multiplied by ``exp(m - m')`` when that grows to m'. So one
loop computes both (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and
an attention is one loop over keys.

Worked example: with ``l = sum(n: exp(s - m))`` the weights ``exp(s - m) / l`` are linear once the
division has left the sum: ``sum(n: exp(s - m)/l * v)`` is ``sum(n: exp(s - m) * v) / l``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusec.ir.expr import Cast, Const, Expr, Op, Reduce, Select, children, postorder
from fusec.ir.index import Axis
from fusec.ir.monoid import MAX, SUM
from fusec.ir.rewrite import rewrite


def find_pivots(roots: Iterable[Expr]) -> dict[Reduce, Reduce]:
    """Return each sum that is linear in ``exp(s - m)``, with its maximum m over the same axes."""
    nodes = postorder(roots)
    maxima = [n for n in nodes if isinstance(n, Reduce) and n.monoid is MAX and n.dtype.is_float]
    found: dict[Reduce, Reduce] = {}
    for node in nodes:
        if isinstance(node, Reduce) and node.monoid is SUM and node.dtype.is_float:
            for pivot in maxima:
                if set(pivot.over) == set(node.over) and _is_linear(node.body, pivot):
                    found[node] = pivot
                    break
    return found


def dependents(roots: Iterable[Expr], pivot: Reduce) -> set[Expr]:
    """Return the nodes below ``roots`` that have ``pivot`` below them."""

    found: set[Expr] = {pivot}
    for node in postorder(roots):
        if any(child in found for child in children(node)):
            found.add(node)
    return found - {pivot}


def _is_linear(root: Expr, pivot: Reduce) -> bool:
    """Return True if ``root`` is a multiple of ``exp(s - pivot)`` by what does not mention it."""
    mentions = dependents((root,), pivot) | {pivot}
    node, held = root, frozenset[Expr]()
    while node in mentions:
        match node:
            case Op(name="exp", args=(Op(name="sub", args=(score, base)),)) if base is pivot:
                return score not in mentions and _at_most(score, pivot.body, held)
            case Op(name="mul", args=(a, b)) if (a in mentions) is not (b in mentions):
                node = a if a in mentions else b
            case Op(name="div", args=(a, b)) if b not in mentions:
                node = a
            case Op(name="neg" | "round_f16" | "round_bf16", args=(a,)):
                node = a
            case Cast(arg=a) if a.dtype.is_float and node.dtype.is_float:
                node = a
            case Select(condition=c, then=a, other=Const(value=0)) if c not in mentions:
                node, held = a, held | {c}
            case _:
                return False
    return False


def _at_most(score: Expr, top: Expr, held: frozenset[Expr]) -> bool:
    """Return True if ``score`` never exceeds ``top`` where the conditions ``held`` are true."""
    while score is not top:
        match score, top:
            case Select(condition=c, then=a, other=Const(value=value)), _ if value == -math.inf:
                score, held = a, held | {c}
            case _, Select(condition=c, then=a) if c in held:
                top = a
            case _:
                return False
    return True


def factor_out(roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Return the expressions with divisors and factors that do not vary outside their sums.

    Only of sums that become linear in an ``exp(s - m)`` by it: elsewhere the rounding of a division
    is the user's. A rounding to 16 bits moves to the value before the division.
    """

    def hoisted(node: Expr) -> Expr:
        if not isinstance(node, Reduce) or node.monoid is not SUM or not node.dtype.is_float:
            return node
        body, outside = _split(node.body, frozenset(node.over))
        if not outside:
            return node
        inner = Reduce(SUM, node.over, body)
        if inner not in find_pivots((inner,)):
            return node
        result: Expr = inner
        for name, factor in outside:
            result = Op(name, (result, factor))
        return result

    return rewrite(roots, hoisted)


def _split(root: Expr, over: frozenset[Axis]) -> tuple[Expr, list[tuple[str, Expr]]]:
    """Return a product without its factors that do not vary along ``over``, and these."""
    match root:
        case Op(name="mul" | "div", args=(a, b)) if b.axes.isdisjoint(over):
            rest, outside = _split(a, over)
            return rest, [*outside, (root.name, b)]
        case Op(name="mul", args=(a, b)) if a.axes.isdisjoint(over):
            rest, outside = _split(b, over)
            return rest, [*outside, ("mul", a)]
        case Op(name="mul", args=(a, b)):
            left, outside = _split(a, over)
            right, more = _split(b, over)
            if not outside and not more:
                return root, []
            return Op("mul", (left, right)), [*outside, *more]
        case Op(name="round_f16" | "round_bf16", args=(a,)):
            rest, outside = _split(a, over)
            return (Op(root.name, (rest,)), outside) if outside else (root, [])
        case _:
            return root, []
