"""A cat that begins with what another one joins reads that one; so do gradients, in turn.

A dense block joins all that it has so far before each of its layers. Of n layers that makes n*n
parts, as many slices of gradients, and kernels that ask at each point in which part it is::

    y = cat([a, b]);  z = cat([a, b, c])     becomes     y = cat([a, b]);  z = cat([y, c])

Values are copied, and gradients are added in the order in which autograd adds those of the parts,
so no bit differs. It is done where gradients are wanted: there the shorter one is in memory for its
own reader's. Graphs of Dynamo have side effects, which AOTAutograd takes out: what was written to,
or made without gradients, stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusec.frontend.dynamo_graph import plain_parts
from fusec.torch_interior import HigherOrderOperator, data_of

_CATS = (torch.cat, torch.concat, torch.concatenate)
_Key = tuple[int, tuple[fx.Node, ...]]


def lengthen_cats(gm: fx.GraphModule) -> None:
    """Let the cats of a graph of Dynamo read shorter ones, in place.

    Assumes: nodes carry ``meta["example_value"]``.
    """
    for part in plain_parts(gm):
        if not any(map(_hides_writes, part.graph.nodes)) and _lengthen(part.graph):
            part.recompile()


def _lengthen(graph: fx.Graph) -> bool:
    """Return True if the graph changed."""
    known: dict[_Key, fx.Node] = {}
    changed = False
    for node in graph.nodes:
        found = _joined(node)
        if found is None:
            continue
        axis, parts = found
        shorter = next((k for k in range(len(parts) - 1, 1, -1) if (axis, parts[:k]) in known), 0)
        if shorter:
            node.args = ([known[axis, parts[:shorter]], *parts[shorter:]], axis)
            node.kwargs, changed = {}, True
        known[found] = node
    return changed


def _hides_writes(node: fx.Node) -> bool:
    """Return True for what may write without counting it: ``x.data``, a kernel of the user's."""
    return node.target is data_of or isinstance(node.target, HigherOrderOperator)


def _joined(node: fx.Node) -> _Key | None:
    """Return what a cat joins, and along which axis; None where others must not read it."""
    if node.op != "call_function" or node.target not in _CATS or len(node.args) > 2:
        return None
    rest = dict(node.kwargs)
    parts: Any = node.args[0] if node.args else rest.pop("tensors", None)
    axis: Any = node.args[1] if len(node.args) > 1 else rest.pop("dim", rest.pop("axis", 0))
    if rest or not isinstance(parts, list | tuple) or not isinstance(axis, int):
        return None
    values = [_value(item) for item in (node, *parts)]
    whole = values[0]
    if whole is None or not whole.requires_grad or any(map(_is_hook, node.users)):
        return None
    if any(v is None or v.dtype is not whole.dtype or v.dim() != whole.dim() for v in values):
        return None
    return axis % whole.dim(), tuple(parts)


def _value(item: Any) -> torch.Tensor | None:
    """Return the tensor that an argument is, if nothing was written to it since it was made."""
    value = item.meta.get("example_value") if isinstance(item, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.is_inference() or value._version:
        return None
    return value


def _is_hook(user: fx.Node) -> bool:
    """Return True for what is to see the gradient of a cat by itself."""
    return "hook" in str(user.target)
