"""Find the values of an inference graph that depend on a model's weights alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusec.frontend.fallbacks import is_impure, is_written
from fusec.torch_interior import FakeTensor, OpOverload, is_weight

_WEIGHT = "fusec_weight"
_CONVERSIONS = (
    torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default,
)  # fmt: skip


def mark_weights(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Mark the inputs of a graph that are weights, if it has the inputs that Dynamo gave.

    AOTAutograd merges tensors that are given twice and unwraps subclasses: then none is marked. Nor
    is a tensor made in inference mode: torch does not count the writes to it.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) == len(inputs):
        for node, given in zip(placeholders, inputs, strict=True):
            node.meta[_WEIGHT] = is_weight(given) and not given.is_inference()


def fixed_values(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Return node -> bytes of weights, for the weights and the nodes that depend on these alone.

    A node that depends on no input at all (``arange``, ``full``) has 0. An input that the graph
    writes itself is not fixed.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    weights = (node for node in inputs if node.meta.get(_WEIGHT) and not is_written(node))
    read = {node: frozenset((node,)) for node in weights}
    for node in gm.graph.nodes:
        sources, target = node.all_input_nodes, node.target
        plain = isinstance(target, OpOverload) and target.namespace in ("aten", "prims", "fusec")
        traced = isinstance(node.meta.get("val"), FakeTensor)
        if plain and traced and not is_impure(node) and all(s in read for s in sources):
            read[node] = frozenset().union(*map(read.__getitem__, sources))
    sizes = {node: bytes_of(node) for node in inputs}
    return {node: sum(map(sizes.__getitem__, weights)) for node, weights in read.items()}


def decoded_values(known: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the values among fixed ones that follow from floats which were integers or 8 bits."""
    found: set[fx.Node] = set()
    for node in known:
        if not found.isdisjoint(node.all_input_nodes) or _decodes(node):
            found.add(node)
    return found


def _decodes(node: fx.Node) -> bool:
    """Return True for arithmetic, or a conversion, that makes wider floats of codes."""
    target, made = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or not isinstance(made, Tensor):
        return False
    if torch.Tag.pointwise not in target.tags and target not in _CONVERSIONS:
        return False
    given = [source.meta["val"].dtype for source in node.all_input_nodes]
    codes = [d for d in given if d.itemsize == 1 or not (d.is_floating_point or d.is_complex)]
    return (
        made.is_floating_point() and made.itemsize > 1 and any(d is not torch.bool for d in codes)
    )


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's tensor, 0 where its shape is not known."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or any(not isinstance(n, int) for n in value.shape):
        return 0
    return value.numel() * value.element_size()
