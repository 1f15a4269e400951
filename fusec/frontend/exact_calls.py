"""Calls of eager kernels that add no floats, so that they have no order in which they do.

An eager kernel chooses the order of its additions by sizes, strides and threads. Calls that choose
or move elements, compute each element by itself, or make integers give the same bits in any order.

Random draws follow from the generator's state, not from sums.

Assumes: an operation in no table adds.
"""

from __future__ import annotations

import torch
from torch import fx

from fusec.frontend.fallbacks import PADS, draws_random_numbers, named_arguments
from fusec.frontend.origin import op_name
from fusec.frontend.parts import CALLS_PARTS
from fusec.torch_interior import HigherOrderOperator, OpOverload, pytree

_NAMES = """
    sort topk kthvalue median nanmedian mode msort cummax cummin
    index index_select gather take embedding masked_select repeat_interleave index_put
    _unsafe_index_put index_copy index_fill scatter masked_scatter put slice_scatter select_scatter
    diagonal_scatter as_strided_scatter cat stack clone copy copy_ fill roll flip tril triu
    constant_pad_nd max_pool2d_with_indices max_pool3d_with_indices fractional_max_pool2d
    fractional_max_pool3d adaptive_max_pool2d adaptive_max_pool3d max_unpool2d max_unpool3d
    empty empty_strided empty_like new_empty new_empty_strided empty_permuted
"""
_CHOOSES_OR_MOVES = frozenset((*_NAMES.split(), *PADS))
"""Operations of ATen without arithmetic, unless they accumulate or reduce."""


def is_exact(node: fx.Node) -> bool:
    """Return True if a call adds no floats.

    Nor does a higher-order operation whose branches or bodies are compiled like the rest.
    """
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return target.name() in CALLS_PARTS
    values = pytree.tree_leaves(node.meta.get("val"))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return True
    if not isinstance(target, OpOverload):
        return False
    if target.is_view or torch.Tag.pointwise in target.tags or draws_random_numbers(target):
        return True
    if target is torch.ops.fusec.random_seeds.default:
        return True
    adds = "reduce" in target._overloadname or named_arguments(node).get("accumulate", False)
    return op_name(target).partition(".")[0] in _CHOOSES_OR_MOVES and not adds
