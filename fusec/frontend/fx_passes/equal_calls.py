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

from fusec.frontend.fallbacks import draws_random_numbers, written_arguments
from fusec.torch_interior import pytree

aten = torch.ops.aten


def share_equal_calls(graph: fx.Graph) -> None:
    """Replace each call by the first equal one."""
    returned = _returned_memory(graph)
    known: dict[object, tuple[fx.Node, Any]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if written_arguments(node):
            known.clear()
        elif not _is_its_own(node) and returned.isdisjoint(_memory(node)):
            leaves, layout = pytree.tree_flatten((node.args, node.kwargs))
            key = (node.target, *map(_identity, leaves))
            first, same = known.setdefault(key, (node, layout))
            if first is not node and same == layout:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _is_its_own(node: fx.Node) -> bool:
    allocates = getattr(node.target, "overloadpacket", None) is aten.empty
    return allocates or draws_random_numbers(node.target)


def _identity(leaf: Any) -> object:
    """Return a key that equal arguments share: 1, 1.0 and True differ, and so do both zeros."""
    match leaf:
        case fx.Node():
            return leaf
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return leaf.node
        case _:
            return type(leaf), repr(leaf)


def _returned_memory(graph: fx.Graph) -> set[int]:
    return {memory for node in graph.output_node().all_input_nodes for memory in _memory(node)}


def _memory(node: fx.Node) -> tuple[int, ...]:
    """Return the storage of a call's result as a tuple; empty if it is not a tensor with one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ()
    try:
        return (value.untyped_storage()._cdata,)
    except NotImplementedError:
        return ()
