"""Eliminate common subexpressions of a joint graph, before it is cut into forward and backward.

AOTAutograd's own pass for this imports a hundred modules of Inductor, which take 0.6 CPU-seconds of
each process, to number the regions between writes. Two calls are equal if their targets and
arguments are, and nothing is written between them. Calls that draw random numbers or allocate
uninitialised memory, and calls whose memory is returned, are not merged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusec.frontend.aliasing.overlap import memory_of
from fusec.frontend.fallbacks import draws_random_numbers
from fusec.frontend.fx_passes.fx_nodes import aten, replace, tensor_of
from fusec.torch_interior import pytree, written_arguments


def share_equal_calls(graph: fx.Graph) -> None:
    """Replace each call by the first equal one."""
    returned = set(map(_memory, graph.output_node().all_input_nodes)) - {None}
    known: dict[object, tuple[fx.Node, Any]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        allocates = getattr(node.target, "overloadpacket", None) is aten.empty
        if written_arguments(node):
            known.clear()
        elif not (allocates or draws_random_numbers(node.target) or _memory(node) in returned):
            leaves, layout = pytree.tree_flatten((node.args, node.kwargs))
            key = (node.target, *map(_identity, leaves))
            first, same = known.setdefault(key, (node, layout))
            if first is not node and same == layout:
                replace(node, first)


def _identity(leaf: Any) -> object:
    """Return a key that equal arguments share: 1, 1.0 and True differ, and so do both zeros."""
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf.node
    return leaf if isinstance(leaf, fx.Node) else (type(leaf), repr(leaf))


def _memory(node: fx.Node) -> int | None:
    value = tensor_of(node)
    return None if value is None else memory_of(value)
