"""Read calls of Dynamo's graphs, and make equal calls of all iterations of a loop at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate

from fusec.frontend.aliasing.overlap import called_name, tensor_of, written_by
from fusec.torch_interior import EXAMPLE, OpOverload, OpOverloadPacket, qualified_name

Column: TypeAlias = tuple[Any, ...]
"""What stands at one place of each iteration."""
_WRITERS = ("batch_norm", "instance_norm", "__setitem__", "__iadd__", "__isub__", "__imul__")
"""What writes without a name that says so: running statistics, and methods of operators."""
_OWN = (".", "torch.", "_operator.", "math.")
_OTHERS = ("torch.ops.", "torch._higher_order_ops.")
_PLAIN = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size, int, float)
"""Types of values of calls without another effect, such as a mode."""


class StaysError(Exception):
    """A column has no rolled form."""


@dataclass(frozen=True, slots=True)
class Rolled:
    """The rolled form of a column.

    Attributes:
        node: a tensor with the iterations in front; if not ``varies`` the value of all iterations.
    """

    node: Any
    varies: bool


def each(name: str, axes: Any, args: Any, kwargs: Any) -> Any:
    """Call a function for all iterations at once.

    Args:
        name: as ``function_of`` takes it.
        axes: 0 for each argument that has the iterations in front, None for others, in the
            structure of ``(args, kwargs)``.

    Raises:
        RuntimeError: if the function draws random numbers.
    """
    function = function_of(name)

    def once(args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.vmap(once, axes, randomness="error")(args, kwargs)


def name_of(call: fx.Node) -> str | None:
    """Return the name of what a node calls; None if ``function_of`` does not find it."""
    if call.op == "call_method":
        return f".{call.target}"
    name = qualified_name(call.target) if callable(call.target) else ""
    return name if function_of(name) is call.target else None


def function_of(name: str) -> Any:
    """Return a function of a qualified name, or a method of one that begins with a dot."""
    if name.startswith("."):
        return lambda x, *args, **kwargs: getattr(x, name[1:])(*args, **kwargs)
    root, *path = name.split(".")
    found: Any = sys.modules.get(root)
    for part in path:
        found = getattr(found, part, None)
    return found


def axes_of(value: Any, varying: Callable[[fx.Node], bool]) -> Any:
    """Return 0 for nodes that vary and None for all else, in the structure of a value."""
    match value:
        case tuple() | list():
            return type(value)([axes_of(item, varying) for item in value])
        case dict():
            return {key: axes_of(item, varying) for key, item in value.items()}
    return 0 if isinstance(value, fx.Node) and varying(value) else None


def may_be_called(node: fx.Node) -> bool:
    """Return True for a call of torch's own that writes nothing."""
    name = name_of(node) if node.op in ("call_function", "call_method") else None
    if name is None or writes(node):
        return False
    return name.startswith(_OWN) and not name.startswith(_OTHERS)


def writes(node: fx.Node) -> bool:
    """Return True for a call that writes an argument, or that may have another effect."""
    if not node.op.startswith("call"):
        return False
    value, target = node.meta.get(EXAMPLE), node.target
    items = value if isinstance(value, tuple | list) else (value,)
    overloads = [target] if isinstance(target, OpOverload) else []
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    by_schema = any(overload._schema.is_mutable for overload in overloads)
    named = called_name(node) in _WRITERS or node.op == "call_module"
    silent = not all(isinstance(item, _PLAIN) for item in items)
    return named or by_schema or silent or any(x is not None for x in written_by(node))


def arguments_of(column: Column) -> tuple[tuple[Any, Any], list[Column]] | None:
    """Return the arguments of equal calls as columns, and their places; None for other calls."""
    first = column[0]
    if not isinstance(first, fx.Node) or not first.op.startswith("call_"):
        return None
    found: list[tuple[Any, list[Any]]] = []
    for item in column:
        if not isinstance(item, fx.Node) or (item.op, item.target) != (first.op, first.target):
            return None
        found.append(leaves_of(item))
    if any(places != found[0][0] for places, _ in found):
        return None
    return found[0][0], list(zip(*(leaves for _, leaves in found), strict=True))


def leaves_of(node: fx.Node) -> tuple[Any, list[Any]]:
    """Return a node's arguments with numbers in the places of values, and these values."""
    leaves: list[Any] = []

    def note(leaf: Any) -> Any:
        leaves.append(leaf)
        return len(leaves) - 1

    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), note)
    return (args, kwargs), leaves


def inputs_of(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def closure(
    nodes: Iterable[fx.Node], beside: Callable[[fx.Node], Iterable[fx.Node]] = inputs_of
) -> set[fx.Node]:
    """Return nodes, those beside them, and so on: all that they follow from, unless told."""
    pending = list(nodes)
    found = set(pending)
    while pending:
        new = [node for node in beside(pending.pop()) if node not in found]
        found.update(new)
        pending += new
    return found


# -- values ----------------------------------------------------------------------------------------


def are_alike(nodes: Sequence[Any]) -> bool:
    """Return True for tensors of one shape, type and device."""
    first = tensor_of(nodes[0])
    return first is not None and all(
        x is not None
        and (x.dtype, x.device) == (first.dtype, first.device)
        and has_shape(x, first.shape)
        for x in map(tensor_of, nodes)
    )


def has_shape(x: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Return True for a tensor that is known to have a shape."""
    pairs = zip(x.shape, shape, strict=False)
    return x.dim() == len(shape) and all(statically_known_true(a == b) for a, b in pairs)


def has_strides(x: torch.Tensor, like: torch.Tensor) -> bool:
    """Return True for a tensor with another one's strides, where it has several elements."""
    triples = zip(x.shape, x.stride(), like.stride(), strict=True)
    return all(
        statically_known_true(a == b) for n, a, b in triples if not statically_known_true(n == 1)
    )


def has_elements(value: Any, item: Any, *rows: int) -> bool:
    """Return True for an item's shape and type behind axes of rows, and for tuples of such."""
    if isinstance(item, torch.Tensor) and isinstance(value, torch.Tensor):
        alike = (value.dtype, value.device) == (item.dtype, item.device)
        return alike and has_shape(value, (*rows, *item.shape))
    if isinstance(item, tuple | list) and isinstance(value, tuple | list):
        pairs = zip(value, item, strict=False)
        return len(value) == len(item) and all(has_elements(a, b, *rows) for a, b in pairs)
    return not rows and type(value) is type(item) and statically_known_true(value == item)


def is_same(column: Column) -> bool:
    """Return True for one node in all iterations, and for equal constants."""
    first = column[0]
    if isinstance(first, fx.Node):
        return all(item is first for item in column)
    return all(
        item is first or (type(item) is type(first) and repr(item) == repr(first))
        for item in column
    )
