"""Replace softmax masks by the lowest finite number with masks by -inf, if no row is fully masked.

Spec: ``kernel -> kernel``. In a softmax over n of ``where(n > m, -3.4e38, s)`` a masked term is
``exp(-3.4e38 - max) = 0`` wherever the row has another score: the mask acts like minus infinity,
at which loops can end (``codegen/lowering/band.py``). The same holds where scores are added to such
a mask. A fully masked row has equal weights instead: so the condition must provably leave at least
one key in each row.

Scores are matrix products, slopes by distance, and values computed from these only. Products are as
low as the mask only after an overflow; a row in which *all* overflowed becomes NaN, where eager has
equal weights. Functions of positions alone are bounded; a loaded slope is taken to be a slope. A
tensor among the scores, such as a bias, may itself be a mask by the lowest number: then nothing is
changed.

The value subtracted before the exponential must not contain the lowest number: a maximum of masked
scores has been rewritten before. A minimum of them is as low as the mask, and a masked term 1.

Worked example: above, ``n <= m`` has to hold for some n in each row m, and does at ``n = 0``. So
does ``n <= m and document[n] == document[m]``, at ``n = m``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from fusec.ir.contraction import factors
from fusec.ir.dtype import F32, F64
from fusec.ir.edges import edges_when
from fusec.ir.expr import (
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    children,
    postorder,
    reductions,
    substitute,
)
from fusec.ir.graph import Kernel
from fusec.ir.index import Axis, Index, index, is_in_range, least, most
from fusec.ir.monoid import MAX
from fusec.ir.rewrite import Rules, is_index_only, rewrite
from fusec.passes.graph.simplify import simplifier

LOWEST = -1e38
"""Constants at or below this are masks. A matrix product that is as low has overflowed."""

PLACE, FAR = 2.0**40, 2.0**80
"""The most that a position is, and a function of positions: far from a mask."""
UNKNOWN = (-math.inf, math.inf)
Ends: TypeAlias = tuple[float, float]
"""The least and the greatest value of an expression."""

_KEEPS_SCORES = frozenset({"add", "sub", "mul", "div", "neg", "tanh", "round_f16", "round_bf16"})


def mask_by_infinity(kernel: Kernel) -> Kernel:
    """Return the kernel with its softmaxes masked by minus infinity where the result is equal."""
    return kernel.map(
        lambda roots: rewrite(roots, MASK_RULES) if any(map(_has_mask, roots)) else roots
    )


def masked_maximum(node: Reduce) -> Expr:
    """``max(n: where(n > m, -3.4e38, s))`` is ``max(n: where(n > m, -inf, s))``."""
    if node.monoid is not MAX or not node.dtype.is_float:
        return node
    return Reduce(MAX, node.over, _masked(node.body, frozenset(node.over)))


def masked_exponential(node: Op) -> Expr:
    """``exp(where(n > m, -3.4e38, s) - top)`` is ``exp(where(n > m, -inf, s) - top)``."""
    match node.args:
        case (Op(name="sub", args=(scores, top)),) if scores.axes > top.axes and not _has_mask(top):
            return Op("exp", (Op("sub", (_masked(scores, scores.axes - top.axes), top)),))
    return node


MASK_RULES = Rules((masked_maximum, Reduce), (masked_exponential, "exp"))


def _has_mask(root: Expr) -> bool:
    return any(map(_is_mask, postorder((root,))))


def _is_mask(node: Expr) -> bool:
    return isinstance(node, Const) and node.dtype.is_float and -math.inf < node.value <= LOWEST


def _masked(node: Expr, keys: frozenset[Axis]) -> Expr:
    """Return scores masked by minus infinity where that is legal, else unchanged."""
    match node:
        case Cast(arg=scores) if scores.dtype.is_float and node.dtype.is_float:
            return Cast(_masked(scores, keys), node.dtype)
        case Op(name="round_f16" | "round_bf16", args=(scores,)):
            return Op(node.name, (_masked(scores, keys),))
        case Op(name="sub", args=(scores, base)) if base.axes.isdisjoint(keys):
            return node if _has_mask(base) else Op("sub", (_masked(scores, keys), base))
        case Op(name="add", args=(scores, Select() as mask) | (Select() as mask, scores)):
            nothing = mask.other if _is_mask(mask.then) else mask.then
            is_zero = isinstance(nothing, Const) and nothing.value == 0
            return (_by_infinity(mask, scores, keys) or node) if is_zero else node
        case Select():
            scores = node.other if _is_mask(node.then) else node.then
            return _by_infinity(node, scores, keys) or node
    return node


def _by_infinity(mask: Select, scores: Expr, keys: frozenset[Axis]) -> Expr | None:
    """Return scores masked by -inf; None if a row may be fully masked, or ``mask`` is no mask."""
    hides, seen = _is_mask(mask.then), mask.condition
    if not (hides or _is_mask(mask.other)) or not _are_scores(scores):
        return None
    if any(not keys.isdisjoint(n.over) for n in reductions(seen)):  # which bind a key again
        return None
    points = _points(edges_when(seen, not hides), keys)
    if not any(_is_always(not hides, seen.substitute(point)) for point in points):
        return None
    hidden = Const(-math.inf, scores.dtype)
    return Select(mask.condition, *((hidden, scores) if hides else (scores, hidden)))


def _is_always(truth: bool, condition: Expr) -> bool:
    (known,) = simplifier()((condition,))
    return isinstance(known, Const) and known.value is truth


@functools.lru_cache(maxsize=4096)
def _are_scores(node: Expr) -> bool:
    """Return True for values of matrix products and of positions, which are far above a mask.

    A tensor may occur as a factor of a position: the slopes of a bias by distance (ALiBi).
    """
    match node:
        case Reduce():
            return factors(node) is not None
        case Op(name="mul", args=(a, b)) if Load in map(type, map(_uncast, (a, b))):
            position = b if isinstance(_uncast(a), Load) else a
            return bool(position.axes) and is_index_only(position) and _are_scores(position)
        case _ if is_index_only(node):
            return max(map(abs, _ends(node))) <= FAR
        case Op(name=name):
            return name in _KEEPS_SCORES and all(map(_are_scores, children(node)))
        case Cast():
            return all(map(_are_scores, children(node)))
    return False


def _uncast(node: Expr) -> Expr:
    while isinstance(node, Cast):
        node = node.arg
    return node


def _points(edges: Iterable[Index], keys: frozenset[Axis]) -> Iterator[dict[Axis, Index]]:
    """Yield candidate keys that a row may leave unmasked: the first, and the keys on an edge."""
    first = dict.fromkeys(keys, index(0))
    yield first
    for edge in edges:
        for key in keys:
            step = edge.coefficient(key)
            if step is not None and step.is_constant and abs(step.const) == 1:
                at = substitute(index(key) - step * edge, first)
                if is_in_range(at, key.extent):
                    yield {**first, key: at}


def _ends(node: Expr) -> tuple[float, float]:
    """Return bounds of a function of positions in f32 or f64, as slopes of heads are made."""
    match node:
        case IndexValue(index=at):
            low, high = least(at), most(at)
            return -PLACE if low is None else low, PLACE if high is None else high
        case Const(value=value):
            return value, value
        case Cast(arg=arg) if isinstance(arg, IndexValue | Const) or arg.dtype in (F32, F64):
            return _ends(arg) if node.dtype in (F32, F64) else UNKNOWN
        case Op(name=name, args=args) if node.dtype in (F32, F64):
            return _of_operation(name, *map(_ends, args))
    return UNKNOWN


def _of_operation(name: str, a: Ends, b: Ends = (0.0, 0.0)) -> Ends:
    match name:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul" if math.inf not in map(abs, (*a, *b)):
            return _sorted(x * y for x in a for y in b)
        case "div" if b[0] > 1 / FAR and math.inf not in map(abs, a):
            return _sorted(x / y for x in a for y in b)
        case "neg":
            return -a[1], -a[0]
        case "tanh":
            return -1.0, 1.0
        case "exp2":
            return _powers(2.0, a)
        case "pow" if a[0] == a[1] > 0:
            return _powers(a[0], b)
        case "reciprocal" if a[0] > 1 / FAR:
            return 1 / a[1], 1 / a[0]
        case _:
            return UNKNOWN


def _powers(base: float, ends: Ends) -> Ends:
    """Return the powers of a positive base; unknown beyond those that f32 holds."""
    logs = [end * math.log2(base) for end in ends]
    return _sorted(2.0**log for log in logs) if max(map(abs, logs)) < 126 else UNKNOWN


def _sorted(values: Iterable[float]) -> Ends:
    found = sorted(values)
    return found[0], found[-1]
