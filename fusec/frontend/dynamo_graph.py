"""Graphs of Dynamo, before AOTAutograd: which of them may call functions of fusec instead."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx


def plain_parts(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph and those that it calls, without those that transforms of ``torch.func`` run.

    Such transforms ask more of a function than its gradient.
    """
    for part in gm.modules():
        if isinstance(part, fx.GraphModule) and not any(map(_transforms, part.graph.nodes)):
            yield part


def _transforms(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    return module.startswith(("torch._functorch", "torch._C._functorch", "torch.autograd"))
