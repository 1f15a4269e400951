"""Unify symbolic sizes that an operation requires to be equal, but tracing does not compare.

Tracing ``scaled_dot_product_attention`` does not compare the lengths of keys and values, nor do
those of the operation's kernels that run without a mask. So lengths that were marked as dynamic
separately stay two symbols, and no loop over keys can load both. A call in which they differ has no
meaning. So they are compared here: one guard, which holds in every call, makes them one symbol.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import fx

from fusec.frontend.aliasing.overlap import tensor_of
from fusec.frontend.fx_passes.fx_nodes import called_with


def unify_sizes(gm: fx.GraphModule) -> None:
    """Compare the sizes of a Dynamo graph that must be equal, except those without a traced value.

    Assumes: nodes carry ``meta["example_value"]``.
    """
    for node in gm.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            called_with(_compare_lengths, node)


def _compare_lengths(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> None:
    tensors = [t for t in map(tensor_of, (key, value)) if t is not None and t.dim() > 1]
    sizes: list[Any] = [tensor.shape[-2] for tensor in tensors]
    if len(sizes) == 2 and all(isinstance(n, int) or n.node.has_hint() for n in sizes):
        bool(sizes[0] == sizes[1])
