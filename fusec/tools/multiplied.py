"""Count the multiply-adds of the matrix products in an eager kernel, by torch's FLOP formulas.

Worked example: ``mm`` of f32[8, 64] and f32[64, 32] does ``{"f32": 8 * 64 * 32}``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusec.frontend.fx_passes.fx_nodes import hint_of
from fusec.frontend.shapes import from_torch_dtype
from fusec.frontend.size_facts import UNSEEN
from fusec.torch_interior import OpOverload, pytree

aten = torch.ops.aten
_ALIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operations without a FLOP formula -> operations with the same count."""


def multiplied(node: fx.Node) -> dict[str, int]:
    """Return operand type -> multiply-adds of a node's call, at the hints of symbolic sizes.

    Masked scores of an attention count, too. Empty for an operation without a formula.
    """
    # Local: it imports Triton, which takes 0.2 s.
    from torch.utils.flop_counter import flop_registry

    if not isinstance(node.target, OpOverload):
        return {}
    packet = node.target.overloadpacket
    formula = flop_registry.get(_ALIKE.get(packet, packet))
    operands = [a.meta.get("val") for a in node.all_input_nodes]
    kinds = [from_torch_dtype(o.dtype).name for o in operands if isinstance(o, torch.Tensor)]
    if formula is None or not kinds:
        return {}
    args, kwargs, out = fx.map_arg((node.args, dict(node.kwargs), node), lambda n: n.meta["val"])
    shapes: Any = pytree.tree_map_only(
        torch.Tensor, lambda t: tuple(hint_of(n, UNSEEN) for n in t.shape), (args, kwargs, out)
    )
    return {kinds[0]: int(formula(*shapes[0], **shapes[1], out_val=shapes[2])) // 2}
