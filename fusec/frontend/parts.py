"""The subgraphs of a graph: branches and loop bodies that a higher-order operation calls.

``torch.cond``, loops and ``torch.compiler.nested_compile_region`` have graphs of their own, which
the outer graph refers to by attribute. Their eager implementations call these with tensors, so any
callable that takes tensors can replace them. Others, such as the ``score_mod`` of
``flex_attention``, are called under transforms of ``torch.func``, and are not replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from fusec.torch_interior import HigherOrderOperator

_ONCE = {"cond", "invoke_subgraph"}
_AGAIN = {"while_loop", "while_loop_stack_output", "scan", "map_impl"}
"""Operations that call a subgraph with the traced tensors, and later with others."""


def find_parts(gm: fx.GraphModule) -> Mapping[str, fx.GraphModule]:
    """Return attribute -> subgraph, for the subgraphs that operations of a graph call."""
    found: dict[str, fx.GraphModule] = {}
    for node in gm.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator):
            continue
        if node.target.name() not in _ONCE | _AGAIN:
            continue
        for source in node.all_input_nodes:
            if source.op != "get_attr":
                continue
            part = operator.attrgetter(source.target)(gm)
            if isinstance(part, fx.GraphModule):  # else a tensor: a constant
                found[source.target] = part
    return found


def runs_again(gm: fx.GraphModule, attribute: str) -> bool:
    """Return True if a loop calls a subgraph: tensors may have other strides than traced."""
    return any(
        user.target.name() in _AGAIN
        for node in gm.graph.nodes
        if node.op == "get_attr" and node.target == attribute
        for user in node.users
        if isinstance(user.target, HigherOrderOperator)
    )


def traced_strides(part: fx.GraphModule) -> tuple[tuple[int, ...] | None, ...] | None:
    """Return the strides of a subgraph's arguments, None for an argument that is not a tensor.

    None instead of a tuple if a stride is symbolic, or 0 as of an expand (a gradient of a sum):
    what a loop passes is dense.
    """
    found: list[tuple[int, ...] | None] = []
    for node in part.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            strides = value.stride() if isinstance(value, torch.Tensor) else None
            if strides is not None and not all(type(s) is int and s > 0 for s in strides):
                return None
            found.append(strides)
    return tuple(found)
