"""Fold operations that are affine per channel into the weights of the convolution before them.

Runs on inference graphs of ATen under ``options={"freeze": True}``, before ``freeze`` makes the
weights constants::

    (conv(x, w) - mean[c]) * scale[c] + shift[c]
        = conv(x, w * scale[c], bias=shift[c] - mean[c] * scale[c])

so that a BatchNorm at inference costs nothing. New weights are computed in fp64 and rounded once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from fusec.frontend.fx_passes.fx_nodes import aten, call_like, prims
from fusec.frontend.fx_passes.weights import fixed_values

_AFFINE = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def fold_channels(gm: fx.GraphModule) -> None:
    """Fold the affine operations per channel after convolutions into weights, in place."""
    known = fixed_values(gm)
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        _, weight, bias, *_, transposed, _, _ = node.args
        if weight in known and (bias is None or bias in known) and not transposed:
            chain = _affine(node, known)
            if chain:
                _fold(gm.graph, node, chain)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _affine(node: fx.Node, known: dict[fx.Node, int]) -> list[fx.Node]:
    """Return the chain of operations after a node that are affine in its channels, in order."""
    found: list[fx.Node] = []
    value, channels = node.meta["val"], node.meta["val"].shape[1]
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in _AFFINE or user.kwargs or len(user.args) != 2:
            break
        other = user.args[1] if user.args[0] is node else user.args[0]
        same = user.meta["val"].shape == value.shape and user.meta["val"].dtype == value.dtype
        divides = user.target is aten.div.Tensor and user.args[0] is not node
        if not same or divides or not _is_by_channel(other, known, value.dim(), channels):
            break
        found.append(user)
        node = user
    return found


def _is_by_channel(other: Any, known: dict[fx.Node, int], rank: int, channels: int) -> bool:
    """Return True for a number, or a known tensor that varies along the channels alone."""
    if not isinstance(other, fx.Node):
        return isinstance(other, int | float)
    shape = other.meta["val"].shape
    if other not in known or len(shape) > rank:
        return False
    whole = (1,) * (rank - len(shape)) + tuple(shape)
    return whole[1] in (1, channels) and all(n == 1 for k, n in enumerate(whole) if k != 1)


def _fold(graph: fx.Graph, node: fx.Node, chain: list[fx.Node]) -> None:
    """Replace the last operation of a chain after a convolution by one with other weights."""
    x, weight, bias, *rest = node.args
    value = weight.meta["val"]  # type: ignore[union-attr]
    rank, channels, last = value.dim(), value.shape[0], chain[-1]

    add = partial(call_like, last)

    def by_channel(other: Any, *shape: int) -> Any:
        if not isinstance(other, fx.Node):
            return other
        flat = add(aten.reshape.default, other, [-1])
        return add(aten.reshape.default, flat, list(shape)) if shape else flat

    with graph.inserting_before(last):
        w = add(prims.convert_element_type.default, weight, torch.float64)
        b = None if bias is None else add(prims.convert_element_type.default, bias, torch.float64)
        previous = node
        for step in chain:
            swapped = step.args[0] is not previous
            other = step.args[0] if swapped else step.args[1]
            if step.target in (aten.mul.Tensor, aten.div.Tensor):
                w = add(step.target, w, by_channel(other, -1, *(1,) * (rank - 1)))
                b = None if b is None else add(step.target, b, by_channel(other))
            else:
                if step.target is aten.sub.Tensor and swapped:
                    w = add(aten.neg.default, w)
                    b = None if b is None else add(aten.neg.default, b)
                shift = by_channel(other)
                b = add(aten.new_zeros.default, w, [channels]) if b is None else b
                b = add(aten.add.Tensor if swapped else step.target, b, shift)
            previous = step
        kind = value.dtype
        arguments = (
            x,
            add(prims.convert_element_type.default, w, kind),
            b and add(prims.convert_element_type.default, b, kind),
            *rest,
        )
        made = add(node.target, *arguments)
    made.meta = {**last.meta, "val": last.meta["val"]}
    last.replace_all_uses_with(made)
