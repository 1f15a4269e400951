"""The parts of a graph: branches and bodies that a higher-order operation calls with tensors.

``torch.cond``, loops and ``torch.compiler.nested_compile_region`` keep graphs of their own, which
the graph around refers to by attribute. Their eager implementations call them with tensors, so
whatever takes tensors may stand in their place. Others, a score's modification in
``flex_attention`` say, are called under transforms of ``torch.func``, and stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from fusec.torch_interior import HigherOrderOperator

_ONCE = {"cond", "invoke_subgraph"}
_AGAIN = {"while_loop", "while_loop_stack_output", "scan", "map_impl"}
"""Operations that call their parts with the tensors that were traced, and with others, too."""


def find_parts(gm: fx.GraphModule) -> Mapping[str, fx.GraphModule]:
    """Return the parts of a graph by the attribute that holds them, each once."""
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
    """Return True if a loop calls a part, with tensors whose strides may be others than traced."""
    return any(
        user.target.name() in _AGAIN
        for node in gm.graph.nodes
        if node.op == "get_attr" and node.target == attribute
        for user in node.users
        if isinstance(user.target, HigherOrderOperator)
    )


def traced_strides(part: fx.GraphModule) -> tuple[tuple[int, ...] | None, ...] | None:
    """Return the strides of a part's arguments, None for those that are no tensors.

    None if some vary with symbolic sizes, or expand a tensor (a gradient of a sum): what a loop
    hands over is dense.
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
