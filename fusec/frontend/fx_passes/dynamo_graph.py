"""Helpers for rewrites of Dynamo graphs, before AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx


def call_instead(gm: fx.GraphModule, functions: Mapping[Any, Callable[..., Any]]) -> None:
    """Replace functions that a graph and its subgraphs call, in place.

    Args:
        functions: a function, or a method's name -> the function to call instead.
    """
    for part in plain_parts(gm):
        found = [n for n in part.graph.nodes if n.op.startswith("call_") and n.target in functions]
        for node in found:
            node.op, node.target = "call_function", functions[node.target]
        if found:
            part.recompile()


def plain_parts(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph and its subgraphs, except those with transforms of ``torch.func``.

    Such transforms need more of a function than its gradient.
    """
    for part in gm.modules():
        if isinstance(part, fx.GraphModule) and not any(map(_transforms, part.graph.nodes)):
            yield part


def _transforms(node: fx.Node) -> bool:
    module = getattr(node.target, "__module__", None) or ""
    return module.startswith(("torch._functorch", "torch._C._functorch", "torch.autograd"))


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of an FX graph, over the same modules and tensors."""
    new = fx.Graph()
    new.output(new.graph_copy(gm.graph, {}))
    made = fx.GraphModule(gm, new)
    made.meta = dict(gm.meta)
    return made
