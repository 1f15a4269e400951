"""The algebra of online softmax: sums that may run in the same loop as their maximum.

A sum over n of ``exp(s - m) * w`` with ``m = max(n: s)`` needs m before its first term. But
``exp(s - m') = exp(s - m) * exp(m - m')``: a sum of terms that are linear in ``exp(s - m)`` may use
the running maximum, and is rescaled by ``exp(m - m')`` when that grows from m to m'. So one
loop computes both (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and
an attention is one loop over keys.

A positive factor of the scores may be applied after the maximum, ``max(n: k*x) = k * max(n: x)``:
rounding keeps order, so both are equal to the last bit. The terms are then ``exp(k*x - k*m)``.

Terms may be relative to more than their maximum, ``exp(s - u)`` with u the larger of m and a sink:
a sum of ``exp(s - m)`` is then multiplied by ``exp(m - u)`` when the loop has ended. Of scores with
an infinity the sum is NaN, and that of ``exp(s - u)`` is where u is inf, too. With a finite u, as
a log-sum-exp has it there, a plain sum is ``exp(m - u)``, inf; a weighted one is not known.

Worked example: with ``l = sum(n: exp(s - m))`` the weights ``exp(s - m) / l`` are linear once the
division is moved out of the sum: ``sum(n: exp(s - m)/l * v)`` is ``sum(n: exp(s - m) * v) / l``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from typing import TypeAlias

from fusec.errors import InternalError
from fusec.ir.expr import Const, Expr, Op, Reduce, Select, op, postorder, select
from fusec.ir.index import Axis
from fusec.ir.known import is_known_nan
from fusec.ir.linear import dependents, terms
from fusec.ir.monoid import MAX, SUM
from fusec.ir.rewrite import Rules, replace_nodes

Scale: TypeAlias = tuple[str, float]
"""How scores are scaled: ("mul", k) or ("div", k), with k positive."""
Outside: TypeAlias = Callable[[Expr], Expr]
"""Applies a factor, a divisor or a condition to a sum that it was moved out of."""
ONE: Scale = ("mul", 1.0)
LEAST = 1e-30
"""The least factor that is moved: below it, or above its inverse, one side may overflow."""


def find_row_maxima(roots: Iterable[Expr]) -> dict[Reduce, Reduce]:
    """Return each sum that is linear in ``exp(s - m)``, with its maximum m over the same axes."""
    nodes = postorder(roots)
    maxima = [n for n in nodes if isinstance(n, Reduce) and n.monoid is MAX and n.dtype.is_float]
    found: dict[Reduce, Reduce] = {}
    for node in nodes:
        if isinstance(node, Reduce) and node.monoid is SUM and node.dtype.is_float:
            for row_max in maxima:
                if set(row_max.over) == set(node.over) and _is_linear(node.body, row_max):
                    found[node] = row_max
                    break
    return found


def _is_linear(root: Expr, row_max: Reduce) -> bool:
    """Return True if ``root`` is ``exp(s - row_max)`` times factors independent of ``row_max``."""
    varying = dependents((root,), (row_max,)) | {row_max}
    match list(terms(root, varying)):
        case [(Op(name="exp", args=(Op(name="sub", args=(a, b)),)), held)]:
            # The scale is applied to the maximum, or inside it as to the scores.
            (score, factor), (base, other) = (a, ONE) if b is row_max else unscaled(a), unscaled(b)
            known = base is row_max and score not in varying and factor == other
            return known and _at_most(score, row_max.body, held)
    return False


def scale_of(node: Reduce, row_max: Reduce) -> Scale:
    """Return the scale k of a sum of ``exp(k*s - k*m)`` beside its maximum m."""
    for inner in postorder((node.body,)):
        match inner:
            case Op(name="exp", args=(Op(name="sub", args=(_, b)),)):
                base, scale = unscaled(b)
                if base is row_max:
                    return scale
    raise InternalError(f"{node} does not refer to {row_max}", stage="ir.online")


def reference(top: Expr) -> Expr:
    """Return the maximum that is subtracted from scores; 0 while all are -inf, to avoid NaN."""
    return select(op("eq", top, -math.inf), 0.0, top)


def growth(scale: Scale, old: Expr, new: Expr) -> Expr:
    """Return the factor that makes a sum of ``exp(k*s - k*old)`` one of ``exp(k*s - k*new)``."""
    return op("exp", scaled(old - new, scale))


def merged(total: Expr, scale: Scale, top: Expr, maximum: Expr) -> Expr:
    """Return a part's term of a sum: its own, relative to ``top``, relative to the whole maximum.

    A part without a score above -inf contributes 0, unless the whole row has none: that is NaN.
    """
    return _weighted(total, growth(scale, top, maximum), top, maximum)


def _weighted(total: Expr, weight: Expr, top: Expr, base: Expr) -> Expr:
    nothing = op("eq", top, -math.inf) & op("gt", base, -math.inf)
    return select(nothing, 0, op("mul", total, weight))


def scale_outside_mask(node: Select) -> Expr:
    """``where(c, x * k, -inf)`` is ``where(c, x, -inf) * k``, for a positive k."""
    match node:
        case Select(condition=c, then=a, other=Const(value=value)) if value == -math.inf:
            score, scale = unscaled(a)
            return scaled(Select(c, score, node.other), scale)
        case Select(condition=c, then=Const(value=value), other=b) if value == -math.inf:
            score, scale = unscaled(b)
            return scaled(Select(c, node.then, score), scale)
    return node


def scale_outside_maximum(node: Reduce) -> Expr:
    """``max(n: x * k)`` is ``max(n: x) * k``, to the last bit, for a positive k.

    The maximum is then scaled once per row instead of once per score, and the scores' factor can be
    merged with that of the logarithm's base (``codegen/triton/base_two.py``).
    """
    if node.monoid is not MAX or not node.dtype.is_float:
        return node
    score, scale = unscaled(node.body)
    return scaled(Reduce(MAX, node.over, score), scale)


SCALE_RULES = Rules((scale_outside_mask, Select), (scale_outside_maximum, Reduce))
"""Rules that move positive factors out of maxima, and out of masks by minus infinity."""


def unscaled(node: Expr) -> tuple[Expr, Scale]:
    """Return a node without its positive constant factor or divisor, and that, or ``ONE``."""
    match node:
        case Op(name="mul" | "div", args=(a, Const(value=k))) if a.dtype.is_float:
            if LEAST <= k <= 1 / LEAST:
                return a, (node.name, float(k))
    return node, ONE


def scaled(node: Expr, scale: Scale) -> Expr:
    """Return a node multiplied or divided by a number; the node itself where that is 1."""
    name, k = scale
    return node if k == 1 else Op(name, (node, Const(k, node.dtype)))


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


def factor_outside_sum(node: Reduce) -> Expr:
    """``sum(n: exp(s - m) / l * v)`` is ``sum(n: exp(s - m) * v) / l``, as l does not vary along n.

    Factors move likewise, and conditions whose other branch is 0, for fully masked rows. Only sums
    that become linear in an ``exp(s - m)`` by it are changed: elsewhere a division rounds where the
    user wrote it. A rounding to 16 bits moves to the value before the division. Of ``exp(s - u)``
    with u made of m, ``exp(m - u)`` moves.
    """
    return _moved(node, ()) or node


def weights_outside_quotient(node: Op) -> Expr:
    """``sum(n: exp(s - u) * v) / l`` is ``sum(n: exp(s - m) * v) * exp(m - u) / l``, u made of m.

    A softmax that is divided behind its sum. A divisor that is inf where m is makes NaN of what
    has any weights, so a u that is finite there does not matter.
    """
    total, divisor = node.args
    if not isinstance(total, Reduce):
        return node
    return _moved(total, (lambda total: Op("div", (total, divisor)),)) or node


def _moved(node: Reduce, around: tuple[Outside, ...]) -> Expr | None:
    """Return a sum with factors moved out of it, and what is ``around`` it; None for any other."""
    if node.monoid is not SUM or not node.dtype.is_float:
        return None
    body, outside = _split(node.body, frozenset(node.over))
    body, shift = _by_own_maximum(body, frozenset(node.over))
    inner = Reduce(SUM, node.over, body)
    if not (outside or shift) or inner not in find_row_maxima((inner,)):
        return None
    if shift is None:
        return _applied((*outside, *around), inner)
    top, less = shift
    outside = [partial(_shifted_back, top=top, less=less), *outside, *around]
    result = _applied(outside, inner)
    if is_known_nan(result, {top: math.inf, inner: math.inf}):
        return result  # whatever the sum is there
    if not _is_plain(body, top):
        return None
    return _applied(outside, select(op("eq", top, math.inf), 1.0, inner))


def _shifted_back(total: Expr, top: Expr, less: tuple[Expr, ...]) -> Expr:
    """Return a sum of ``exp(s - top)`` as one of ``exp(s - a - b)``, where ``less`` is (a, b).

    They are subtracted in turn, as from the scores: ``m + log(l)`` is m where m is far from 0.
    """
    weight = op("exp", reduce(operator.sub, less, top))
    return _weighted(total, weight, top, reduce(operator.add, less))


def _applied(outside: Iterable[Outside], total: Expr) -> Expr:
    for around in outside:
        total = around(total)
    return total


def _is_plain(body: Expr, top: Reduce) -> bool:
    """Return True for ``exp(s - top)`` without weights, of the very scores that top is of."""
    match body:
        case Op(name="round_f16" | "round_bf16", args=(a,)):
            return _is_plain(a, top)
        case Op(name="exp", args=(Op(name="sub", args=(score, _)),)):
            return score is top.body
    return False


def difference_outside_maximum(node: Reduce) -> Expr:
    """``max(n: s - maximum(max(n: s), c))`` is ``max(n: s) - maximum(max(n: s), c)``, exactly.

    A softmax of scores that a user has shifted has two maxima. Of what is above the scores alone:
    a constant of -inf would make NaN of some terms, and leave their maximum.
    """
    match node:
        case Reduce(monoid=monoid, bodies=(Op(name="sub", args=(score, base)),)) if monoid is MAX:
            top = Reduce(MAX, node.over, score)
            if base is top or (
                isinstance(base, Op) and base.name == "maximum" and top in base.args
            ):
                return top - base
    return node


ONLINE_RULES = Rules(
    (difference_outside_maximum, Reduce),
    (factor_outside_sum, Reduce),
    (weights_outside_quotient, "div"),
)
"""Rules by which a sum can run in the loop of its maximum."""


def _by_own_maximum(
    body: Expr, over: frozenset[Axis]
) -> tuple[Expr, tuple[Reduce, tuple[Expr, ...]] | None]:
    """Return terms relative to their scores' own maximum, that, and what was subtracted from them.

    ``exp(s - u)`` of an attention with a sink, where u is ``maximum(max(n: s), sink)``.
    """
    for factor in _factors(body):
        score, less = _shifted(factor, over)
        for top in postorder(less):
            if not isinstance(top, Reduce) or top.monoid is not MAX or set(top.over) != over:
                continue
            if less != (top,) and _at_most(score, top.body, frozenset()):
                (own,) = replace_nodes((body,), {factor: op("exp", score - top)})
                return own, (top, less)
    return body, None


def _factors(root: Expr) -> Iterator[Expr]:
    """Yield the factors of a product, below roundings."""
    match root:
        case Op(name="mul", args=args) | Op(name="round_f16" | "round_bf16", args=args):
            for arg in args:
                yield from _factors(arg)
        case _:
            yield root


def _shifted(node: Expr, over: frozenset[Axis]) -> tuple[Expr, tuple[Expr, ...]]:
    """Return the scores of an exponential, and what is subtracted from them, in turn."""
    less: tuple[Expr, ...] = ()
    if not isinstance(node, Op) or node.name != "exp":
        return node, less
    (score,) = node.args
    while isinstance(score, Op) and score.name == "sub" and score.args[1].axes.isdisjoint(over):
        score, last = score.args
        less = (last, *less)
    return score, less


def _split(root: Expr, over: frozenset[Axis]) -> tuple[Expr, list[Outside]]:
    """Return a product without factors invariant along ``over``, and functions that apply these."""
    around: Outside
    match root:
        case Select(condition=c, then=a, other=Const(value=0)) if c.axes.isdisjoint(over):
            inner, around = a, lambda total: Select(c, total, Const(0.0, total.dtype))
        case Select(condition=c, then=Const(value=0), other=a) if c.axes.isdisjoint(over):
            inner, around = a, lambda total: Select(c, Const(0.0, total.dtype), total)
        case Op(name="mul" | "div" as name, args=(a, b)) if b.axes.isdisjoint(over):
            inner, around = a, lambda total: Op(name, (total, b))
        case Op(name="mul", args=(a, b)) if a.axes.isdisjoint(over):
            inner, around = b, lambda total: Op("mul", (total, a))
        case Op(name="mul", args=(a, b)):
            left, outside = _split(a, over)
            right, more = _split(b, over)
            return Op("mul", (left, right)), [*outside, *more]
        case Op(name="round_f16" | "round_bf16" as name, args=(a,)):
            rest, outside = _split(a, over)
            return Op(name, (rest,)), outside
        case _:
            return root, []
    rest, outside = _split(inner, over)
    return rest, [*outside, around]
