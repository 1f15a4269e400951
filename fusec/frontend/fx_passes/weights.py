"""Find the values of an inference graph that depend on a model's weights alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx

from fusec.frontend.fallbacks import is_impure, is_written
from fusec.torch_interior import FakeTensor, OpOverload, is_weight

_WEIGHT = "fusec_weight"


def mark_weights(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Mark the inputs of a graph that are weights, if it has the inputs that Dynamo gave.

    AOTAutograd merges tensors that are given twice and unwraps subclasses: then none is marked. Nor
    is a tensor made in inference mode: torch does not count the writes to it.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) == len(inputs):
        for node, given in zip(placeholders, inputs, strict=True):
            node.meta[_WEIGHT] = is_weight(given) and not given.is_inference()


def fixed_inputs(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the inputs of a graph that are weights, except those that it writes itself."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return {node for node in placeholders if node.meta.get(_WEIGHT) and not is_written(node)}


def follow_from(gm: fx.GraphModule, fixed: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Return node -> bytes of fixed inputs, for the nodes that depend on fixed inputs alone.

    A node that depends on no input at all (``arange``, ``full``) has 0.
    """
    known: dict[fx.Node, int] = {node: bytes_of(node) for node in fixed}
    for node in gm.graph.nodes:
        sources, target = node.all_input_nodes, node.target
        plain = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
        traced = isinstance(node.meta.get("val"), FakeTensor)
        if plain and traced and not is_impure(node) and all(s in known for s in sources):
            known[node] = sum(map(known.__getitem__, sources))
    return known


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's tensor, 0 where its shape is not known."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or any(not isinstance(n, int) for n in value.shape):
        return 0
    return value.numel() * value.element_size()
