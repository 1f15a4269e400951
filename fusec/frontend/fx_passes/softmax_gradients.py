"""Compute the row sums of a softmax's gradient from an attention's output instead of its weights.

The gradient of ``p = softmax(s)`` is ``p * (dp - sum(n: dp * p))``. Where a product follows,
``o[m, d] = sum(n: p[m, n] * v[n, d])``, its own gradient is ``dp = sum(d: do[m, d] * v[n, d])``, so
by exchanging sums ``sum(n: dp * p)`` is ``sum(d: do * o)`` (Dao et al., "FlashAttention", 2022,
appendix B). Runs on the joint graph of forward and backward, before AOTAutograd's partitioner: o is
an output of the forward, p is not in memory where scores are recomputed. A kernel of gradients has
one loop over keys fewer: seven products of an attention's backward, not nine.

Between both products and the softmax there may be views that keep the order of elements,
conversions of floats, and factors that both have: a dropout's mask and scale.

Small scores may as well be saved, and then the sum costs nothing. Products in 16 bits are left
alone: where the library computes dp, its rounding error is as large as ``dp - sum(n: dp * p)`` of a
saturated softmax, and cancels only in it (queries equal to keys in bf16: an error 9 to 15 times
that of eager's dq; in f32 2.3 to 3.9 times, 2026-11).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusec.frontend.fx_passes.fx_nodes import (
    call_like,
    cast_like,
    count_bytes,
    extent_of,
    hint_of,
    is_view,
)

aten = torch.ops.aten


_NARROW = (torch.float16, torch.bfloat16)
_COPIES = (aten.clone.default, aten._to_copy.default)
_RESHAPES = (
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default),
    *(aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default),
)


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A tensor, in its own order of elements, times masks and numbers.

    Attributes:
        factors: pairs of a mask of its shape and the number that scales the selected elements.
    """

    node: fx.Node
    factors: Counter[tuple[fx.Node, float]]


def rewrite_softmax_row_sums(gm: fx.GraphModule, least: int) -> fx.GraphModule:
    """Replace row sums of softmax gradients in place; nodes carry ``meta["val"]``.

    Args:
        least: bytes of scores from which it pays: others may as well be saved.
    """
    changed = False
    for total in list(gm.graph.nodes):
        if _is_row_sum(total) and (sides := _find_sides(total.args[0], least)) is not None:
            with gm.graph.inserting_before(total):
                total.replace_all_uses_with(_sum_of(*sides, total))
            gm.graph.erase_node(total)
            changed = True
    if changed:
        gm.recompile()
    return gm


def _is_row_sum(node: fx.Node) -> bool:
    if node.target is not aten.sum.dim_IntList:
        return False
    value = _source(node).meta["val"]
    axes = list(node.args[1] or ())  # type: ignore[arg-type]  # None: over all of them
    return axes in ([-1], [value.dim() - 1]) and value.is_floating_point()


def _source(node: fx.Node) -> fx.Node:
    (first, *_) = node.args
    assert isinstance(first, fx.Node)
    return first


def _find_sides(product: Any, least: int) -> tuple[fx.Node, fx.Node] | None:
    """Return the nodes do and o whose product has the row sums of ``dp * p``, or None."""
    product = _strip(product)
    if product.target is not aten.mul.Tensor:
        return None
    a, b = product.args
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node) and _has_shape(a, b)):
        return None
    for gradient, weights in ((a, b), (b, a)):
        back, plain = _trace(gradient), _trace(weights)
        if back.node.target is aten.bmm.default and _ends_alike(product, back.node):
            for forward in _products_of(back.node, least):
                made = _trace(_source(forward))
                same = made.node is plain.node and _ends_alike(product, _source(forward))
                earlier = forward < product  # in the graph's order
                if same and earlier and made.factors == back.factors + plain.factors:
                    return _source(back.node), forward
    return None


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


def _trace(node: fx.Node) -> _Scaled:
    """Return the tensor that views, conversions and factors lead back to, and the factors."""
    factors: Counter[tuple[fx.Node, float]] = Counter()
    while True:
        node = _strip(node)
        if node.target is not aten.mul.Tensor:
            return _Scaled(node, factors)
        for value, by in (node.args, node.args[::-1]):
            factor = _factor(by)
            if isinstance(value, fx.Node) and factor and _has_shape(factor[0], value):
                factors[factor] += 1
                node = value
                break
        else:
            return _Scaled(node, factors)


def _strip(node: fx.Node) -> fx.Node:
    """Return the source of views that keep the order of elements, and of float conversions."""
    while (node.target in _COPIES and _is_float(node) and _is_float(_source(node))) or (
        (is_view(node) or node.target in _RESHAPES) and _keeps_order(node)
    ):
        node = _source(node)
    return node


def _is_float(node: fx.Node) -> bool:
    """Return True for floats of 16 bits or more: 8 bits would change the sum."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype.is_floating_point and dtype.itemsize > 1


def _keeps_order(node: fx.Node) -> bool:
    shape = _source(node).meta["val"].shape
    if node.target is aten.permute.default:
        dimensions: Any = node.args[1]
        order = [d % len(shape) for d in dimensions]
        moved = [d for d in order if not statically_known_true(shape[d] == 1)]
        return moved == sorted(moved)
    if node.target is aten.expand.default:
        return _same_shape(shape, node.meta["val"].shape)
    return node.target in _RESHAPES


def _factor(node: Any) -> tuple[fx.Node, float] | None:
    """Return mask and number of a node that is the number where the mask is true, else 0."""
    match getattr(node, "target", None), getattr(node, "args", ()):
        case aten.where.self, (mask, scale, zero) if _number(zero) == 0:
            number = _number(scale)
        case aten.mul.Tensor, (fx.Node() as cast, float() | int() as number):
            mask = _mask_of(cast)
        case aten._to_copy.default, _:
            mask, number = _mask_of(node), 1.0
        case _:
            return None
    return None if mask is None or number is None else (mask, float(number))


def _mask_of(node: fx.Node) -> fx.Node | None:
    if node.target is aten._to_copy.default and _source(node).meta["val"].dtype is torch.bool:
        return _source(node)
    return None


def _number(node: Any) -> float | None:
    if isinstance(node, fx.Node) and node.target is aten.full.default and node.args[0] == []:
        return node.args[1]  # type: ignore[return-value]
    return None


def _has_shape(one: fx.Node, other: fx.Node) -> bool:
    return _same_shape(one.meta["val"].shape, other.meta["val"].shape)


def _same_shape(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in pairs)


def _ends_alike(a: fx.Node, b: fx.Node) -> bool:
    """Return True if the rows of two tensors are known to have equal length."""
    return statically_known_true(a.meta["val"].shape[-1] == b.meta["val"].shape[-1])
