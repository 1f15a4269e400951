"""The cache key of an FX graph: graphs with equal keys can run the same compiled code.

It covers all that captured code depends on: operations, arguments, and the type, shape, strides,
device and symbolic expressions of every value. Names of the user's parameters and paths are left
out, so identical blocks share one entry. The operations from which nodes were decomposed
(``original_aten``) are included, since kernels are named after them.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fusec.frontend.ops.literals import numbers_of
from fusec.frontend.size_facts import facts_of
from fusec.torch_interior import pytree

_PLAIN = (bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool)


def graph_key(gm: fx.GraphModule, *salt: str) -> str:
    """Return a hexadecimal digest of a graph and of ``salt`` (versions, options, target)."""
    text: list[str] = [*salt, _facts(gm)]
    for node in gm.graph.nodes:
        text.append(f"{node.op} {node.name} {node.target} {node.args!r} {node.kwargs!r}")
        text.append(str(node.meta.get("original_aten")))
        text.append(_value(node.meta.get("val")))
        text.append(_attribute(node, gm) if node.op == "get_attr" else "")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _attribute(node: fx.Node, gm: fx.GraphModule) -> str:
    """Return the key of an attribute: of a subgraph, which may be a loop's body, or of numbers."""
    held = operator.attrgetter(str(node.target))(gm)
    return graph_key(held) if isinstance(held, fx.GraphModule) else str(numbers_of(node, gm))


def _facts(gm: fx.GraphModule) -> str:
    """Return the facts about the symbols of a graph as text: indices are normalised by them."""
    symbols: set[Any] = set()
    environment = None
    for node in gm.graph.nodes:
        for number in _numbers(node.meta.get("val")):
            if isinstance(number, torch.SymInt) and hasattr(number.node, "expr"):
                symbols |= number.node.expr.free_symbols
                environment = number.node.shape_env
    return facts_of(symbols, environment) if environment is not None else ""


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the extents and strides of a traced value's tensors, and its other leaves."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield from leaf.shape
            yield from leaf.stride() if leaf.layout is torch.strided else ()
        else:
            yield leaf


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return (
            f"{value.dtype} {list(map(_number, value.shape))} {list(map(_number, strides))} "
            f"{value.device} {value.layout} {value.is_conj()} {value.is_neg()}"
        )
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_value, value)) + ")"
    if value is None or isinstance(value, _PLAIN):
        return repr(_number(value))
    return type(value).__qualname__  # an object for eager kernels; its repr has an address


def _number(value: Any) -> Any:
    """Return a size as an int, or a symbol with its hint (kernels are scheduled for hints)."""
    if isinstance(value, torch.SymInt):
        node = value.node
        return f"{node.expr}~{node.hint if node.has_hint() else None}"
    return value
