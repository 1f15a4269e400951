"""Helpers for rewrites of FX graphs whose values AOTAutograd has traced."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusec.errors import InvalidIR
from fusec.ir.decision import Decision
from fusec.torch_interior import FakeTensor, OpOverload, pytree

aten, prims = torch.ops.aten, torch.ops.prims
DECISIONS = "decisions"
"""Key of a node's ``meta`` with what passes have decided about it, in order."""
_KEPT = (
    "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "seq_nr",
    "original_aten", "from_node", "partitioner_tag", "ac_graph_id", "recompute", "custom",
)  # fmt: skip


def decide(node: fx.Node, decision: Decision) -> None:
    """Record what a pass has decided about a node, for the graph that is captured."""
    node.meta[DECISIONS] = (*node.meta.get(DECISIONS, ()), decision)


def called_with(function: Callable[..., Any], node: fx.Node) -> Any:
    """Call a function with a node's arguments; None if it has no parameter for one of them."""
    try:
        given = inspect.signature(function).bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    return function(*given.args, **given.kwargs)


def is_tangent(node: fx.Node) -> bool:
    """Return True for an input of a joint or backward graph that is the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def call_like(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call at the graph's insertion point, with the source lines and tags of a node."""
    made = like.graph.call_function(target, args, kwargs)
    made.meta.update({k: v for k, v in like.meta.items() if k in _KEPT})
    made.meta["val"] = value_of_call(made, like)
    return made


def call_of_value(like: fx.Node, value: Any, target: Any, *args: Any) -> fx.Node:
    """Insert a call as ``call_like`` does, of given value: torch cannot trace the call."""
    made = like.graph.call_function(target, args)
    made.meta.update({k: v for k, v in like.meta.items() if k in _KEPT}, val=value)
    return made


def replace(node: fx.Node, made: fx.Node | Sequence[fx.Node | None]) -> None:
    """Replace a call, or each of its results, and erase it; what has None is not read."""
    if isinstance(made, fx.Node):
        node.replace_all_uses_with(made)
    else:
        for part in list(node.users):
            if (new := made[part.args[1]]) is not None:  # type: ignore[index]
                part.replace_all_uses_with(new)
            node.graph.erase_node(part)
    node.graph.erase_node(node)


def cast_like(like: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return a node, or a conversion of it with the source lines and tags of ``like``."""
    if node.meta["val"].dtype is dtype:
        return node
    return call_like(like, aten._to_copy.default, node, dtype=dtype)


def value_of_call(node: fx.Node, like: fx.Node | None = None) -> Any:
    """Return the traced value of a call on the traced values of its arguments.

    Args:
        like: a node with a tensor of the graph's fake mode, for a call that takes none.
    """
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    sources = (*node.all_input_nodes, *(() if like is None else (like,)))
    mode = next(t for source in sources for t in fakes_of(source.meta["val"])).fake_mode
    with mode:
        return target(*args, **kwargs)


def verify_values(gm: fx.GraphModule) -> None:
    """Check that each call makes a tensor of the layout that it was traced with.

    Without a compiler the graph runs as it stands, and its views rely on these layouts.

    Raises:
        InvalidIR: if a rewrite changed arguments of a call, and so the layout of its result.
    """
    for node in gm.graph.nodes:
        traced = tensor_of(node)
        if traced is None or not _is_pure(node):
            continue
        laid_out, made = (_strides(value) for value in (traced, value_of_call(node)))
        if made != laid_out:
            told = f"{node.format_node()} makes strides {made}, and is traced with {laid_out}"
            raise InvalidIR(told)


def results_of(gm: fx.GraphModule) -> list[torch.Tensor | None]:
    """Return the traced tensors that a graph returns, None for anything else; also Dynamo's."""
    (returned,) = gm.graph.output_node().args
    values = (n.meta.get("val", n.meta.get("example_value")) if isinstance(n, fx.Node) else None
              for n in pytree.tree_leaves(returned))  # fmt: skip
    return [value if isinstance(value, torch.Tensor) else None for value in values]


def verify_results(before: Sequence[torch.Tensor | None], gm: fx.GraphModule) -> None:
    """Check that a rewritten graph returns tensors of the types and layouts that it had before.

    Raises:
        InvalidIR: if a result has others: its reader is outside of the graph.
    """
    for position, (one, other) in enumerate(zip(before, results_of(gm), strict=True)):
        if one is not None and other is not None and _layout(one) != _layout(other):
            told = f"result {position} is made as {_layout(other)}, and was {_layout(one)}"
            raise InvalidIR(told)


def _layout(value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    shape = tuple(n for n in value.shape if isinstance(n, int))
    return value.dtype, shape, _strides(value)


def _is_pure(node: fx.Node) -> bool:
    """Return True for a call of tensors that can be traced again: it writes and draws nothing."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape}
    traced = (tensor_of(source) for source in node.all_input_nodes)
    return tags.isdisjoint(target.tags) and any(isinstance(t, FakeTensor) for t in traced)


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides by which elements lie apart; none where a size is a symbol."""
    if not all(isinstance(n, int) for n in (*value.shape, *value.stride())) or 0 in value.shape:
        return ()
    return tuple(s for s, n in zip(value.stride(), value.shape, strict=True) if n != 1)


def extent_of(node: fx.Node, dimension: int) -> int | fx.Node:
    """Return an extent of a tensor as an argument: a number, or a call of ``sym_size``."""
    extent: int | torch.SymInt = node.meta["val"].shape[dimension]
    if isinstance(extent, int):
        return extent
    return call_like(node, aten.sym_size.int, node, dimension)


def fakes_of(value: Any) -> list[FakeTensor]:
    """Return the fake tensors of a traced value."""
    items = value if isinstance(value, tuple | list) else (value,)
    return [item for item in items if isinstance(item, FakeTensor)]


def is_view(node: Any) -> bool:
    """Return True for a call that makes a view."""
    return isinstance(node.target, OpOverload) and node.target.is_view


def hint_of(extent: int | torch.SymInt, unknown: int = 1) -> int:
    """Return an extent or a stride as a number, ``unknown`` where none is known."""
    if isinstance(extent, int):
        return extent
    return int(extent.node.hint) if extent.node.has_hint() else unknown


def tensor_of(node: Any) -> torch.Tensor | None:
    """Return a node's traced tensor; None for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def has_strides(x: torch.Tensor, like: torch.Tensor) -> bool:
    """Return True for a tensor with another one's strides, where it has several elements."""
    triples = zip(x.shape, x.stride(), like.stride(), strict=True)
    return all(
        statically_known_true(a == b) for n, a, b in triples if not statically_known_true(n == 1)
    )


def count_elements(value: torch.Tensor) -> int:
    """Return how many elements a traced tensor has, at the hints of symbolic sizes."""
    return math.prod(map(hint_of, value.shape))


def count_bytes(value: torch.Tensor) -> int:
    """Return the bytes of a traced tensor's elements, at the hints of symbolic sizes."""
    return count_elements(value) * value.itemsize
