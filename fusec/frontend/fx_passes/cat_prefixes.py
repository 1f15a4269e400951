"""Let a ``cat`` that begins with an earlier one's operands read its result; gradients likewise.

A dense block concatenates all its results so far before each of its layers. For n layers that makes
n*n operands, as many slices of gradients, and kernels that select an operand for each element::

    y = cat([a, b]);  z = cat([a, b, c])     becomes     y = cat([a, b]);  z = cat([y, c])

Values are copied. Gradients are the same sums, in a dense block in autograd's order, too: they are
bitwise equal where nothing reads an operand, or a ``cat``, between one ``cat`` and the next. It is
done where gradients are required: there the shorter one is in memory for its own consumer's
gradient. Dynamo graphs have side effects, which AOTAutograd removes: a tensor that is written to,
or made without gradients, stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusec.frontend.aliasing.overlap import called_name, is_in_place, memory_of
from fusec.frontend.fx_passes.dynamo_graph import plain_parts
from fusec.frontend.fx_passes.fx_nodes import called_with
from fusec.torch_interior import HigherOrderOperator, OpOverload, OpOverloadPacket, data_of

_CATS = (torch.cat, torch.concat, torch.concatenate)
_Key = tuple[int, tuple[fx.Node, ...]]


def share_cat_prefixes(gm: fx.GraphModule) -> None:
    """Replace the leading operands of a Dynamo graph's ``cat`` calls by shorter ones, in place.

    Assumes: nodes carry ``meta["example_value"]``.
    """
    for part in plain_parts(gm):
        # Some nodes may write without a version: ``x.data``, a user's kernel.
        targets = [node.target for node in part.graph.nodes]
        hidden = data_of in targets or any(isinstance(t, HigherOrderOperator) for t in targets)
        if not hidden and _lengthen(part.graph):
            part.recompile()


def _lengthen(graph: fx.Graph) -> bool:
    """Return True if the graph changed."""
    known: dict[_Key, fx.Node] = {}
    unsteady = _written_unseen(graph)
    changed = False
    for node in graph.nodes:
        found = _joined(node, unsteady)
        if found is None:
            continue
        axis, parts = found
        shorter = next((k for k in range(len(parts) - 1, 1, -1) if (axis, parts[:k]) in known), 0)
        if shorter:
            node.args = ([known[axis, parts[:shorter]], *parts[shorter:]], axis)
            node.kwargs, changed = {}, True
        known[found] = node
    return changed


def _written_unseen(graph: fx.Graph) -> set[int]:
    """Return the memory that a call may write or detach without increasing a version counter.

    ``x.detach_()``, ``torch._foreach_mul_([x], 2)``, custom operators, and a batch norm's running
    statistics, which require no gradient.
    """
    found: set[int] = set()
    for node in graph.nodes:
        norm = "batch_norm" in called_name(node)
        if norm or is_in_place(node) or isinstance(node.target, OpOverload | OpOverloadPacket):
            values = [source.meta.get("example_value") for source in node.all_input_nodes]
            tensors = [v for v in values if isinstance(v, torch.Tensor)]
            found.update(memory_of(v) for v in tensors if not (norm and v.requires_grad))
    return found


def _joined(node: fx.Node, unsteady: set[int]) -> _Key | None:
    """Return a ``cat``'s axis and operands; None where other ``cat`` calls must not read it."""
    is_cat = node.op == "call_function" and node.target in _CATS
    parts, axis = (is_cat and called_with(_operands, node)) or (None, None)
    if not isinstance(parts, list | tuple) or not isinstance(axis, int):
        return None
    values = [_value(item) for item in (node, *parts)]
    whole = values[0]
    # A hook must get the gradient of a ``cat`` by itself.
    hooked = any("hook" in str(user.target) for user in node.users)
    if whole is None or not whole.requires_grad or hooked:
        return None
    if any(v is None or v.dtype is not whole.dtype or v.dim() != whole.dim() for v in values):
        return None
    if not unsteady.isdisjoint(memory_of(v) for v in values if v is not None):
        return None
    return axis % whole.dim(), tuple(parts)


def _operands(tensors: Any, dim: Any = 0, *, axis: Any = None) -> tuple[Any, Any]:
    return tensors, dim if axis is None else axis


def _value(item: Any) -> torch.Tensor | None:
    """Return an argument's tensor if it was not written to since its creation, else None."""
    value = item.meta.get("example_value") if isinstance(item, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.is_inference() or value._version:
        return None
    return value
