"""Freezing: what follows from the weights of a model alone is computed once, not in each call.

Runs on inference graphs of ATen under ``options={"freeze": True}``. Weights and buffers stay
inputs; what is computed of them alone becomes constants of the graph, and the graph that computes
those (``Recipe``) runs when a weight has changed (``runtime/frozen.py``). Before that, what is
affine in the channels of a convolution's result goes into its weights, which then are constants::

    (conv(x, w) - mean[c]) * scale[c] + shift[c]
        = conv(x, w * scale[c], bias=shift[c] - mean[c] * scale[c])

so that a BatchNorm at inference costs nothing. New weights are computed in fp64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fusec.frontend.fallbacks import is_impure, is_written
from fusec.frontend.fx_nodes import call_like, is_view
from fusec.torch_interior import FakeTensor, OpOverload, is_weight, unset_fake_temporarily

aten, prims = torch.ops.aten, torch.ops.prims

RECIPE = "fusec_recipe"
"""Key of a graph's ``meta``: its ``Recipe``, if it has constants."""
_WEIGHT = "fusec_weight"
_LARGER = 4
"""A constant may take so many times the memory of the weights that it is computed of."""
_AFFINE = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the constants of a graph are computed.

    Attributes:
        compute: from the weights that they are computed of to their values.
        positions: of these weights among the graph's inputs.
        constants: where the values lie; the graph reads them there.
    """

    compute: Callable[..., tuple[Tensor, ...]]
    positions: tuple[int, ...]
    constants: tuple[Tensor, ...]


def mark_weights(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Say which inputs of a graph are weights, if it has those that Dynamo gave.

    AOTAutograd takes tensors apart that are given twice, or are subclasses: then none is marked.
    Nor is one that was made in inference mode: torch does not count the writes to it.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) == len(inputs):
        for node, given in zip(placeholders, inputs, strict=True):
            node.meta[_WEIGHT] = is_weight(given) and not given.is_inference()


def freeze(gm: fx.GraphModule) -> None:
    """Compute once what follows from the weights of a graph alone, in place.

    Weights that the graph itself writes are none.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    fixed = {node for node in placeholders if node.meta.get(_WEIGHT) and not is_written(node)}
    if not fixed:
        return
    _fold_channels(gm, fixed)
    gm.graph.eliminate_dead_code()
    known = _known(gm, fixed)
    wanted = [node for node in known if _is_worth(node, known)]
    if wanted:
        gm.meta[RECIPE] = _replace(gm, placeholders, wanted)
    gm.graph.eliminate_dead_code()
    gm.recompile()


# -- what is known ---------------------------------------------------------------------------------


def _known(gm: fx.GraphModule, fixed: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the nodes that follow from fixed inputs alone: node -> bytes of those inputs.

    What follows from no input at all (``arange``, ``full``) has 0.
    """
    known: dict[fx.Node, int] = {node: _bytes(node) for node in fixed}
    for node in gm.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and _is_pure(node) and all(s in known for s in sources):
            known[node] = sum(map(known.__getitem__, sources))
    return known


def _is_pure(node: fx.Node) -> bool:
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return isinstance(value, FakeTensor) and not is_impure(node)


def _is_worth(node: fx.Node, known: dict[fx.Node, int]) -> bool:
    """Return True for what the rest of the graph reads, itself or through views of it."""
    if node.op == "placeholder" or not known[node] or is_view(node):
        return False
    if any(not isinstance(extent, int) for extent in node.meta["val"].shape):
        return False
    read = any(user not in known and user.op == "call_function" for user in _readers(node))
    # A result that is a constant would be the same tensor each time, which its owner may write.
    given = any(user.op == "output" for user in _readers(node))
    return read and not given and _bytes(node) <= _LARGER * known[node]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node, and in the place of views those of the views."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        yield user


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or any(not isinstance(n, int) for n in value.shape):
        return 0
    return value.numel() * value.element_size()


# -- constants -------------------------------------------------------------------------------------


def _replace(gm: fx.GraphModule, placeholders: list[fx.Node], wanted: list[fx.Node]) -> Recipe:
    """Put constants into the place of nodes, and return how they are computed."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(gm.graph, copies)
    graph.output(tuple(copies[node] for node in wanted))
    graph.eliminate_dead_code(lambda node: node.op == "output")
    positions = tuple(k for k, node in enumerate(placeholders) if copies[node].users)
    constants = []
    for number, node in enumerate(wanted):
        value = node.meta["val"]
        with unset_fake_temporarily():
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        name = f"frozen_{number}"
        gm.register_buffer(name, made)
        with gm.graph.inserting_before(node):
            constant = gm.graph.get_attr(name)
        constant.meta["val"] = value
        node.replace_all_uses_with(constant)
        constants.append(made)
    compute = fx.GraphModule(gm, graph)
    return Recipe(compute, positions, tuple(constants))


# -- channels --------------------------------------------------------------------------------------


def _fold_channels(gm: fx.GraphModule, fixed: set[fx.Node]) -> None:
    """Fold what is affine in the channels of convolutions into their weights."""
    known = _known(gm, fixed)
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        _, weight, bias, *_, transposed, _, _ = node.args
        if weight in known and (bias is None or bias in known) and not transposed:
            chain = _affine(node, known)
            if chain:
                _fold(gm.graph, node, chain)


def _affine(node: fx.Node, known: dict[fx.Node, int]) -> list[fx.Node]:
    """Return the operations behind a node that are affine in its channels, in order."""
    found: list[fx.Node] = []
    value, channels = node.meta["val"], node.meta["val"].shape[1]
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in _AFFINE or user.kwargs or len(user.args) != 2:
            break
        other = user.args[1] if user.args[0] is node else user.args[0]
        same = user.meta["val"].shape == value.shape and user.meta["val"].dtype == value.dtype
        divides = user.target is aten.div.Tensor and user.args[0] is not node
        if not same or divides or not _is_by_channel(other, known, value.dim(), channels):
            break
        found.append(user)
        node = user
    return found


def _is_by_channel(other: Any, known: dict[fx.Node, int], rank: int, channels: int) -> bool:
    """Return True for a number, or a known tensor that varies along the channels alone."""
    if not isinstance(other, fx.Node):
        return isinstance(other, int | float)
    shape = other.meta["val"].shape
    if other not in known or len(shape) > rank:
        return False
    whole = (1,) * (rank - len(shape)) + tuple(shape)
    return whole[1] in (1, channels) and all(n == 1 for k, n in enumerate(whole) if k != 1)


def _fold(graph: fx.Graph, node: fx.Node, chain: list[fx.Node]) -> None:
    """Put a convolution with other weights in the place of the last of a chain behind it."""
    x, weight, bias, *rest = node.args
    value = weight.meta["val"]  # type: ignore[union-attr]
    rank, channels, last = value.dim(), value.shape[0], chain[-1]

    add = partial(call_like, last)

    def by_channel(other: Any, *shape: int) -> Any:
        if not isinstance(other, fx.Node):
            return other
        flat = add(aten.reshape.default, other, [-1])
        return add(aten.reshape.default, flat, list(shape)) if shape else flat

    with graph.inserting_before(last):
        w = add(prims.convert_element_type.default, weight, torch.float64)
        b = None if bias is None else add(prims.convert_element_type.default, bias, torch.float64)
        previous = node
        for step in chain:
            swapped = step.args[0] is not previous
            other = step.args[0] if swapped else step.args[1]
            if step.target in (aten.mul.Tensor, aten.div.Tensor):
                w = add(step.target, w, by_channel(other, -1, *(1,) * (rank - 1)))
                b = None if b is None else add(step.target, b, by_channel(other))
            else:
                if step.target is aten.sub.Tensor and swapped:
                    w = add(aten.neg.default, w)
                    b = None if b is None else add(aten.neg.default, b)
                b = _shifted(add, b, by_channel(other), step.target, swapped, channels, w)
            previous = step
        kind = value.dtype
        arguments = (
            x,
            add(prims.convert_element_type.default, w, kind),
            b and add(prims.convert_element_type.default, b, kind),
            *rest,
        )
        made = add(node.target, *arguments)
    made.meta = {**last.meta, "val": last.meta["val"]}
    last.replace_all_uses_with(made)


def _shifted(
    add: Callable[..., fx.Node],
    bias: fx.Node | None,
    shift: Any,
    target: Any,
    swapped: bool,
    channels: int,
    like: fx.Node,
) -> fx.Node:
    """Return a bias after an addition or a subtraction of ``shift``."""
    if bias is None:
        bias = add(aten.new_zeros.default, like, [channels])
    return add(aten.add.Tensor if swapped else target, bias, shift)
