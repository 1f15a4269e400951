"""Compute the row sums of a softmax's gradient from an attention's output instead of its weights.

The gradient of ``p = softmax(s)`` is ``p * (dp - sum(n: dp * p))``. Where a product follows,
``o[m, d] = sum(n: p[m, n] * v[n, d])``, its own gradient is ``dp = sum(d: do[m, d] * v[n, d])``, so
by exchanging sums ``sum(n: dp * p)`` is ``sum(d: do * o)`` (Dao et al., "FlashAttention", 2022,
appendix B). Runs on the joint graph of forward and backward, before AOTAutograd's partitioner: o is
an output of the forward, p is not in memory where scores are recomputed. A kernel of gradients has
one loop over keys fewer: seven products of an attention's backward, not nine.

Between both products and the softmax there may be views that keep the order of elements,
conversions of floats, and factors that both have: a dropout's mask and scale. Each is asked of a
node's definition in index notation.

Small scores may as well be saved, and then the sum costs nothing. Products in 16 bits are left
alone: where the library computes dp, its rounding error is as large as ``dp - sum(n: dp * p)`` of a
saturated softmax, and cancels only in it (queries equal to keys in bf16: an error 9 to 15 times
that of eager's dq; in f32 2.3 to 3.9 times, 2026-11).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import fx

from fusec.frontend.capture import NodeDefinitions
from fusec.frontend.fx_passes.fx_nodes import (
    aten,
    call_like,
    cast_like,
    count_bytes,
    count_elements,
    extent_of,
    hint_of,
    replace,
)
from fusec.frontend.ops.views import linearise
from fusec.frontend.value import positions
from fusec.ir.dtype import BOOL, F64
from fusec.ir.expr import Cast, Const, Expr, Load, Op, Reduce, Select, reductions
from fusec.ir.graph import Def
from fusec.ir.monoid import SUM

_NARROW = (torch.float16, torch.bfloat16)


def rewrite_softmax_row_sums(gm: fx.GraphModule, least: int) -> None:
    """Replace row sums of softmax gradients in place; nodes carry ``meta["val"]``.

    Args:
        least: bytes of scores from which it pays: others may as well be saved.
    """
    products = gm.graph.find_nodes(op="call_function", target=aten.bmm.default)
    known = {back: made for back in products if (made := list(_products_of(back, least)))}
    sizes = {count_elements(back.meta["val"]) for back in known}
    nodes, changed = NodeDefinitions(gm), False
    for total in gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        value = _source(total).meta["val"]
        last = list(total.args[1] or ()) in ([-1], [value.dim() - 1])  # None: over all axes
        if last and count_elements(value) in sizes and (sides := _find_sides(total, known, nodes)):
            with gm.graph.inserting_before(total):
                replace(total, _sum_of(*sides, total))
            changed = True
    if changed:
        gm.recompile()


def _source(node: fx.Node) -> fx.Node:
    (first, *_) = node.args
    assert isinstance(first, fx.Node)
    return first


def _find_sides(
    total: fx.Node, products: Mapping[fx.Node, list[fx.Node]], nodes: NodeDefinitions
) -> tuple[fx.Node, fx.Node] | None:
    """Return the nodes do and o whose product has the row sums of ``dp * p``, or None.

    Args:
        products: the product that gives dp -> those that may give o.
    """
    for line in nodes.of(total):
        for row in reductions(line.expr):
            found = _factors(row.body, nodes) if row.monoid is SUM else Counter()
            for scores in [factor for factor in found if _is_row(factor, row, line)]:
                back = nodes.node_of[scores.buffer]
                for forward in products.get(back, ()):
                    weights = nodes.value(_source(forward))
                    if weights.shape == scores.buffer.shape and forward < total:  # in order
                        others = _factors(weights.at(scores.indices), nodes)
                        if others + Counter([scores]) == found:
                            return _source(back), forward
    return None


def _factors(value: Expr, nodes: NodeDefinitions) -> Counter[Expr]:
    """Return the factors of an element: tensors and masks at indices, and one number.

    Conversions of floats are left out, but for those to 8 bits, which would change a sum.
    """
    found, number, waiting = Counter[Expr](), 1.0, [value]
    while waiting:
        match waiting.pop():
            case Op(name="mul", args=(a, b)) | Select(condition=a, then=b, other=Const(value=0)):
                waiting += (a, b)
            case Cast(arg=a) as cast if a.dtype is BOOL or (_is_wide(a) and _is_wide(cast)):
                waiting.append(a)
            case Op(name="round_f16" | "round_bf16", args=(a,)):
                waiting.append(a)
            case Const(value=k):
                number *= k
            case Load() as load if (inner := nodes.inside(load)) is not load:
                waiting.append(inner)
            case factor:
                found[factor] += 1
    return found + Counter([Const(number, F64)])


def _is_wide(value: Expr) -> bool:
    return value.dtype.is_float and value.dtype.itemsize > 1


def _is_row(factor: Expr, row: Reduce, line: Def) -> TypeGuard[Load]:
    """Return True for a load of whole rows [b, m, n], in the order of their sums in a line."""
    if not isinstance(factor, Load) or len(factor.indices) != 3:
        return False
    *places, key = factor.indices
    *extents, keys = factor.buffer.shape
    number = linearise(tuple(places), tuple(extents))
    whole = (key,) == positions(row.over) and keys is row.over[0].extent
    return whole and number is linearise(positions(line.axes), line.buffer.shape)


def _products_of(back: fx.Node, least: int) -> Iterator[fx.Node]:
    """Yield the products by v, given that by its transpose, if the rewrite pays."""
    turned: Any = back.args[1]
    if turned.target is not aten.permute.default or list(turned.args[1]) != [0, 2, 1]:
        return
    values, scores = turned.args[0], back.meta["val"]
    keys, columns = (hint_of(n) for n in values.meta["val"].shape[1:])
    if columns <= keys and count_bytes(scores) >= least and scores.dtype not in _NARROW:
        for user in values.users:
            if user.target is aten.bmm.default and user.args[1] is values:
                yield user


def _sum_of(gradient: fx.Node, output: fx.Node, total: fx.Node) -> fx.Node:
    """Insert the row sums of the product of two tensors [b, m, d], to replace ``total``."""
    value = total.meta["val"]
    wide = torch.promote_types(value.dtype, torch.float32)
    a, b = (cast_like(total, node, wide) for node in (gradient, output))
    product = call_like(total, aten.mul.Tensor, a, b)
    rows = call_like(total, aten.sum.dim_IntList, product, [-1])
    like = _source(total)
    shape = [extent_of(like, d) for d in range(like.meta["val"].dim() - 1)]
    kept = [1] * (value.dim() - len(shape))
    shaped = call_like(total, aten.view.default, rows, [*shape, *kept])
    return cast_like(total, shaped, value.dtype)
