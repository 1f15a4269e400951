"""The objects that a printed wrapper takes from its FX graph: operators by name, and constants.

Most wrappers take nothing. Others call an operator that has no short name, or need a type, a
device, a number; these can be serialized, so that a stored graph is bound without its FX graph.
Tensors that a graph holds, its subgraphs and the user's functions cannot: such a wrapper needs the
graph.

Worked example, of a dropout's seed::

    {"calls": {"random_seeds_default": "fusec.random_seeds.default"},
     "constants": [["random_seeds_default", ["args", 1], "device", "cpu"]]}
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import fx

from fusec.runtime.interior import OpOverload, mutate_copies

Path: TypeAlias = tuple[str | int, ...]

_PREFIX = "extern_"
_NAMESPACES = ("aten", "prims", "mkldnn", "fusec")
_TYPES = (bool, int, float, str)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class GraphReferences:
    """The operators and constants that a wrapper takes from its graph.

    Attributes:
        calls: callables by the node's name.
        constant: returns an argument of a node by its path.
    """

    calls: Mapping[str, Callable[..., Any]]
    constant: Callable[[str, Path], Any]

    def names(self) -> dict[str, Any]:
        """Return the wrapper's namespace of these operators and constants."""
        calls = {f"{_PREFIX}{name}": call for name, call in self.calls.items()}
        return {**calls, "constant": self.constant}


def _no_constant(name: str, path: Path) -> Any:
    raise KeyError(f"the wrapper has no constant {name} {path}")


NOTHING = GraphReferences({}, _no_constant)
"""For a wrapper that takes nothing."""


def of_graph(
    gm: fx.GraphModule, parts: Mapping[str, Callable[..., Any]] | None = None
) -> GraphReferences:
    """Return the operators and constants of a graph.

    Args:
        parts: callables that replace the graph's attributes of these names.
    """
    nodes = {node.name: node for node in gm.graph.nodes}

    @functools.cache
    def constant(name: str, path: Path) -> Any:
        value = _argument(nodes[name], path)
        if not (isinstance(value, fx.Node) and value.op == "get_attr"):
            return value
        own = (parts or {}).get(str(value.target)) if path else None
        return operator.attrgetter(str(value.target))(gm) if own is None else own

    calls = {n.name: _callee(n) for n in nodes.values() if n.op == "call_function"}
    return GraphReferences(calls, constant)


def describe(taken: Mapping[str, Any], gm: fx.GraphModule) -> dict[str, Any] | None:
    """Return the operators and constants that a wrapper takes from a graph, for JSON.

    Args:
        taken: nodes that it calls, and constants by node and path, as its printer lists them.
    Returns:
        None where a value cannot be serialized.
    """
    if unnamed(taken, gm):
        return None
    nodes = {node.name: node for node in gm.graph.nodes}
    values = [(name, path, _written(_argument(nodes[name], path)))
              for name, path in taken["constants"]]  # fmt: skip
    return {
        "calls": {name: str(nodes[name].target) for name in taken["calls"]},
        "constants": [[name, list(path), *(written or ())] for name, path, written in values],
    }


def unnamed(taken: Mapping[str, Any], gm: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes from which a wrapper takes an operator or value that cannot be serialized.

    Args:
        taken: as in ``describe``.
    """
    nodes = {node.name: node for node in gm.graph.nodes}
    calls = [
        node
        for node in map(nodes.__getitem__, taken["calls"])
        if not isinstance(node.target, OpOverload) or node.target.namespace not in _NAMESPACES
    ]
    values = [nodes[name] for name, path in taken["constants"]
              if _written(_argument(nodes[name], path)) is None]  # fmt: skip
    return list(dict.fromkeys((*calls, *values)))


def described(found: Any) -> GraphReferences:
    """Return the operators and constants that ``describe`` serialized.

    Raises:
        ValueError: for anything else, and for an operator that torch does not have.
    """
    try:
        calls = {str(name): _operator(path) for name, path in found["calls"].items()}
        values = {(name, tuple(path)): _read(kind, text)
                  for name, path, kind, text in found["constants"]}  # fmt: skip
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"nothing that a wrapper takes: {error!r}") from error
    return GraphReferences(calls, lambda name, path: values[name, tuple(path)])


def _argument(node: fx.Node, path: Path) -> Any:
    value: Any = node
    for step in path:
        value = getattr(value, step) if isinstance(step, str) and value is node else value[step]
    return value


def _written(value: Any) -> tuple[str, Any] | None:
    """Return a constant's kind and text; None if it cannot be serialized."""
    if value is None or type(value) in _TYPES:
        return "value", value
    if isinstance(value, torch.device):
        return "device", str(value)
    if isinstance(value, _NAMED):
        return "torch", str(value).removeprefix("torch.")
    return None


def _read(kind: str, text: Any) -> Any:
    if kind == "device":
        return torch.device(text)
    if kind == "torch" and isinstance(found := getattr(torch, text), _NAMED):
        return found
    if kind == "value" and (text is None or type(text) in _TYPES):
        return text
    raise ValueError(f"no constant: {kind} {text!r}")


def _operator(path: str) -> OpOverload:
    namespace, name, overload = path.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    if namespace not in _NAMESPACES or not isinstance(found, OpOverload):
        raise ValueError(f"no operator of torch: {path}")
    return found


def _callee(node: fx.Node) -> Any:
    """Return a node's callee, wrapped if it needs tuples and dictionaries as they were traced.

    A wrapper prints tuples as lists, which torch's operators accept; other callees get the traced
    type back. A dictionary of results becomes a list of its values.
    """
    target: Any = node.target
    if str(target) == "auto_functionalized_v2" and _changes_arguments(node.args[0]):
        return mutate_copies(node.args[0])
    others = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, tuple | dict)]
    if isinstance(target, OpOverload) or not others:
        return target

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: _like(node.kwargs[name], value) for name, value in kwargs.items()}
        result = target(*map(_like, node.args, args), **named)
        return [result[k] for k in node.meta["val"]] if isinstance(result, dict) else result

    return call


def _changes_arguments(called: Any) -> TypeGuard[OpOverload]:
    """Return True for an operator that mutates its arguments, and is no ``out=`` variant."""
    out = getattr(torch.Tag, "out", None)  # torch 2.11 has none
    return isinstance(called, OpOverload) and out not in called.tags


def _like(traced: Any, value: Any) -> Any:
    """Convert a sequence, and the nested ones in it, to the containers that were traced."""
    if not isinstance(traced, tuple | list | dict) or not isinstance(value, tuple | list):
        return value
    if isinstance(traced, dict):
        return dict(zip(traced, map(_like, traced.values(), value), strict=True))
    items = map(_like, traced, value)
    return tuple(items) if isinstance(traced, tuple) else list(items)
