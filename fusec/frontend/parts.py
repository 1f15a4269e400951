"""The subgraphs of a graph: branches and loop bodies that a higher-order operation calls.

``torch.cond``, loops and ``torch.compiler.nested_compile_region`` have graphs of their own, which
the outer graph refers to by attribute. Their eager implementations call these with tensors, so any
callable that takes tensors can replace them. Others, such as the ``score_mod`` of
``flex_attention``, are called under transforms of ``torch.func``, and are not replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

import torch
from torch import fx

from fusec.torch_interior import HigherOrderOperator

_ONCE = {"cond", "invoke_subgraph"}
_AGAIN = {"while_loop", "while_loop_stack_output", "scan", "map_impl"}
"""Operations that call a subgraph with the traced tensors, and later with others."""
CALLS_PARTS = _ONCE | _AGAIN
"""Operations whose subgraphs are compiled: they compute nothing themselves."""


def find_parts(
    gm: fx.GraphModule, called: Collection[str] | None = None
) -> Mapping[str, tuple[fx.GraphModule, bool]]:
    """Return attribute -> subgraph, for the subgraphs that operations of a graph call.

    And whether a loop calls it: then tensors may have other strides than traced.

    Args:
        called: the nodes that are called; None: all. Others were lowered, with their subgraphs.
    """
    found: dict[str, tuple[fx.GraphModule, bool]] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        part = operator.attrgetter(node.target)(gm)
        users = [user for user in node.users if called is None or user.name in called]
        targets = (u.target for u in users if isinstance(u.target, HigherOrderOperator))
        callers = {target.name() for target in targets} & CALLS_PARTS
        if callers and isinstance(part, fx.GraphModule):  # else a tensor: a constant
            _, loops = found.get(node.target, (part, False))
            found[node.target] = part, loops or bool(callers & _AGAIN)
    return found


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
