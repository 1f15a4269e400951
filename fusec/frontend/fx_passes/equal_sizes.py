"""Sizes that an operation asks to be equal, while the trace does not.

Tracing ``scaled_dot_product_attention`` compares the lengths of keys and values as little as the
operation's own kernels do that run without a mask, so that lengths that were marked as dynamic
apart stay two symbols, and no loop over keys can read both. A call in which they differ has no
meaning. So they are compared here: one guard, which holds in every call, makes them one symbol.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx


def unite_sizes(gm: fx.GraphModule) -> None:
    """Compare, in a graph of Dynamo, the sizes that must be equal; sizes unseen stay as they are.

    Assumes: nodes carry ``meta["example_value"]``.
    """
    for node in gm.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            key, value = (_length(node, *place) for place in ((1, "key"), (2, "value")))
            if key is not None and value is not None:
                bool(key == value)


def _length(call: fx.Node, position: int, name: str) -> Any:
    """Return how many keys an argument has, None where that is not a size that was seen."""
    arg = call.args[position] if position < len(call.args) else call.kwargs.get(name)
    tensor = arg.meta.get("example_value") if isinstance(arg, fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        return None
    size: Any = tensor.shape[-2]
    return None if isinstance(size, torch.SymInt) and not size.node.has_hint() else size
