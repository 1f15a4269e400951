"""Helpers for rewrites of Dynamo graphs, before AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx


def call_instead(
    parts: Iterable[fx.GraphModule], instead: Callable[[fx.Node], Callable[..., Any] | None]
) -> None:
    """Replace what the calls of some graphs call, in place.

    Args:
        instead: returns the function that a node is to call, None where it stays.
    """
    for part in parts:
        calls = [node for node in part.graph.nodes if node.op.startswith("call_")]
        found = [(node, function) for node in calls if (function := instead(node)) is not None]
        for node, function in found:
            node.op, node.target = "call_function", function
        if found:
            part.recompile()


def graphs_in(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph and its subgraphs."""
    yield from (part for part in gm.modules() if isinstance(part, fx.GraphModule))


def plain_parts(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph and its subgraphs, except those with transforms of ``torch.func``.

    Such transforms need more of a function than its gradient.
    """
    transforms = ("torch._functorch", "torch._C._functorch", "torch.autograd")
    for part in graphs_in(gm):
        homes = (getattr(node.target, "__module__", None) or "" for node in part.graph.nodes)
        if not any(home.startswith(transforms) for home in homes):
            yield part


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of an FX graph, over the same modules and tensors."""
    new = fx.Graph()
    new.output(new.graph_copy(gm.graph, {}))
    made = fx.GraphModule(gm, new)
    made.meta = dict(gm.meta)
    return made
