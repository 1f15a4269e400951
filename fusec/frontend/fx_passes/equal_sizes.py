"""Unify symbolic sizes that an operation requires to be equal, but tracing does not compare.

Tracing ``scaled_dot_product_attention`` does not compare the lengths of keys and values, nor do
those of the operation's kernels that run without a mask. So lengths that were marked as dynamic
separately stay two symbols, and no loop over keys can load both. A call in which they differ has no
meaning. So they are compared here: one guard, which holds in every call, makes them one symbol.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx


def unify_sizes(gm: fx.GraphModule) -> None:
    """Compare the sizes of a Dynamo graph that must be equal, except those without a traced value.

    Assumes: nodes carry ``meta["example_value"]``.
    """
    for node in gm.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            key, value = (_length(node, *place) for place in ((1, "key"), (2, "value")))
            if key is not None and value is not None:
                bool(key == value)


def _length(call: fx.Node, position: int, name: str) -> Any:
    """Return the number of keys that an argument has, None if that has no traced value."""
    arg = call.args[position] if position < len(call.args) else call.kwargs.get(name)
    tensor = arg.meta.get("example_value") if isinstance(arg, fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
        return None
    size: Any = tensor.shape[-2]
    return None if isinstance(size, torch.SymInt) and not size.node.has_hint() else size
