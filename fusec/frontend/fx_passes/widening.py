"""Multiply in f32 where the CPU's library has no instructions for a type of 16 bits.

Runs on graphs of ATen, inference or joint. Without such instructions oneDNN's and ATen's products
and convolutions of 16-bit floats take their terms one by one. So operands are widened before, and
results rounded behind, which is what these calls do with each term and each sum::

    y = mm(a, b)    becomes    y = bf16(mm(f32(a), f32(b)))

A core with AVX2 then takes a sixth of the time for a linear of 128 rows (2048 x 2048, ``bf16``), a
fiftieth for a ``bmm`` of 8 matrices of 256 x 256, a seventieth for a convolution (64 channels, 3 x
3), a ninth for it channels-last (2026-11-27). Conversions are kernels, which fuse with what stands
beside them. Products of few rows with weights that lie along their terms stay as they are: kernels
of fusec's own widen each weight as they read it (``ir/streamed.py``). So do products around
expansions (logits of a loss), which run in chunks of rows: ``passes/graph/chunk.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fusec.frontend.fx_passes.fx_nodes import call_like, cast_like, fakes_of, hint_of, tensor_of
from fusec.frontend.shapes import from_torch_dtype
from fusec.ir.decision import Decision

aten = torch.ops.aten

WIDENED = "widened"
"""Key of a node's ``meta`` with the decision that it multiplies in f32."""
_REASON = "by rule: the library has no instructions for {} here, and takes terms one by one"
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def widen_operands(
    gm: fx.GraphModule,
    targets: tuple[Any, ...],
    slow: Collection[torch.dtype],
    few: int,
    keep: Collection[fx.Node],
) -> fx.GraphModule:
    """Compute some operations in f32 whose types the library is slow with, in place.

    Args:
        targets: PRODUCTS or CONVOLUTIONS.
        few: rows up to which kernels of fusec's own stream the weights of a product.
        keep: nodes that are left as they are.
    """
    found = [
        node
        for target in targets
        for node in gm.graph.find_nodes(op="call_function", target=target)
        if node not in keep
        and fakes_of(node.meta["val"])[0].dtype in slow
        and not _streams(node, few)
    ]
    for node in found:
        _widen(node, slow)
    if found:
        gm.recompile()
    return gm


def _streams(node: fx.Node, few: int) -> bool:
    """Return True for a product of few rows that a kernel of fusec's own may compute."""
    if node.target in CONVOLUTIONS:
        return False
    a, b = (tensor_of(arg) for arg in node.args[-2:])
    assert a is not None and b is not None
    rows, columns = hint_of(a.shape[-2]), hint_of(b.shape[-1])
    if a.dim() == 3:  # a matrix for each row, perhaps gathered from a table
        return rows == 1 or columns == 1
    return rows <= few and b.stride(0) == 1


def _widen(node: fx.Node, slow: Collection[torch.dtype]) -> None:
    """Replace a call by one on f32, whose results are rounded to the call's types."""

    def wide(argument: Any) -> Any:
        value = tensor_of(argument)
        if value is None or value.dtype not in slow:
            return argument
        return cast_like(node, argument, torch.float32)

    with node.graph.inserting_before(node):
        args = fx.map_arg(node.args, wide)
        kwargs = fx.map_arg(node.kwargs, wide)
        made = call_like(node, node.target, *args, **kwargs)
        kind = from_torch_dtype(fakes_of(node.meta["val"])[0].dtype)
        reason = _REASON.format(kind)
        made.meta[WIDENED] = Decision(node.name, "f32", True, reason, None, str(kind))
        if isinstance(node.meta["val"], torch.Tensor):
            node.replace_all_uses_with(cast_like(node, made, node.meta["val"].dtype))
    for user in list(node.users):  # one of several gradients
        with node.graph.inserting_before(user):
            part = call_like(user, operator.getitem, made, user.args[1])
            user.replace_all_uses_with(cast_like(user, part, user.meta["val"].dtype))
        node.graph.erase_node(user)
    node.graph.erase_node(node)
