"""Partition forward and backward: AOTAutograd's min-cut, adapted to what fusec recomputes for free.

**Operands of products.** By default the cut bans recomputing what the backward has to materialise,
so it saves the operands of the backward's library products: a norm's rows, an activation, the
weights of a softmax. But a fused backward has the parts of each in its registers: the kernel of
GELU's gradient reads GELU's input, that of a norm's gradient reads x and its statistics. It stores
the operand as one output more, without another kernel. So that ban is switched off, and the cut
saves products and row statistics. The other bans stay: no product, no small reduction and no chain
from a far layer is recomputed. Three kinds of values are always saved: an input's copy in 16 bits
(autocast's weights), because no kernel of a backward reads the f32 weight; random draws; and the
values that the gradient of a maximum compares with it, because another kernel's recomputation may
differ in the last bit, and then no value equals the maximum.

**Expansions.** The cut saves the results of matrix products, because it takes every product to be
expensive. An *expansion* is a product far larger than its rows, which a reduction over its columns
consumes: the logits of a loss, rows x vocabulary. Saving it keeps all of it in memory, and then no
pass can run it in chunks of rows (``passes/graph/chunk.py``). So:

* Where all gradients that come back through an expansion are linear in one scalar (a loss that is a
  mean or a sum), the forward computes them for a gradient of 1 of the loss, and the backward
  multiplies them by the scalar. Nothing is computed twice; saved are the gradients of the rows and
  of the weights, which the backward would have computed anyhow.
* Elsewhere (a loss of each row) the expansion is tagged as activation checkpointing's tensors are,
  and the backward recomputes it.

Both are legal for any graph: the first by the linearity of each node's definition in index notation
(``ir/linear.py``). A node without a definition is neither linear nor followed. Gradients in f16,
which has five bits of exponent, are never computed in the forward: they may need the scale that a
loss scaler puts into the scalar.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusec.frontend.aliasing.snapshots import drop_snapshots, take_snapshots
from fusec.frontend.capture import NodeDefinitions
from fusec.frontend.fallbacks import draws_random_numbers, is_product, named_arguments
from fusec.frontend.fx_passes.equal_calls import share_equal_calls
from fusec.frontend.fx_passes.fx_nodes import (
    count_bytes,
    count_elements,
    hint_of,
    is_tangent,
    tensor_of,
)
from fusec.frontend.origin import name_by_forward
from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.expr import Cast, Load, Op, loads, reach, reductions
from fusec.ir.linear import is_linear
from fusec.ir.machine import FusionTuning, Machine
from fusec.ir.monoid import MAX, MIN
from fusec.passes.graph.chunk import is_expansion
from fusec.torch_interior import functorch_config, min_cut_rematerialization_partition

aten = torch.ops.aten

LEAST_BUDGET = 1e-6
"""Stands for a budget of 0, at which AOTAutograd saves inputs alone, not even random draws."""


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph of forward and backward, with the arguments of AOTAutograd's partitioner.

    Attributes:
        outputs: how many of the graph's outputs are the forward's.
        settings: further arguments of AOTAutograd's partitioner, by name.
    """

    module: fx.GraphModule
    inputs: Any
    outputs: int
    settings: Mapping[str, Any]


def partition(
    joined: Joint, tuning: FusionTuning, chunk_bytes: int, memory_budget: float
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph into forward and backward as AOTAutograd does, except for expansions.

    Args:
        tuning: what an expansion is.
        chunk_bytes: products of this size or more may be expansions; 0: none is.
        memory_budget: share of the memory saved by default that may be saved, beside the inputs.
    """
    joint, num_fwd_outputs = joined.module, joined.outputs
    extra: list[fx.Node] = []
    nodes = NodeDefinitions(joint)
    name_by_forward(set(joint.graph.nodes) - _tangent_users(joint.graph))
    if chunk_bytes and (found := find_expansions(nodes, tuning, chunk_bytes)):
        large, size = set[fx.Node]().union(*found.values()), sum(map(_size, found))
        early = hoist_gradients(nodes, large, size)
        if early:
            extra.extend(early)
        elif early is None and size >= tuning.chunk_recomputed * chunk_bytes:
            recompute(large - _tangent_users(joint.graph))
    _save_what_is_not_free(nodes)
    _leave_constants_to_the_last(joint.graph)
    _hide_attention(joint.graph)
    extra.extend(take_snapshots(joint.graph, num_fwd_outputs))
    # The forward's outputs, so that they stay in the forward.
    _set_outputs(joint.graph, num_fwd_outputs, num_fwd_outputs, extra)
    # Equal calls may bind different symbols for sizes that depend on data, which later nodes use.
    binds = any(node.meta.get("unbacked_bindings") for node in joint.graph.nodes)
    if functorch_config.cse and not binds:
        share_equal_calls(joint.graph)
        joint.graph.set_codegen(fx.graph.CodeGen())  # arguments by name, not as nested lists
    with _cut(memory_budget):
        forward, backward = min_cut_rematerialization_partition(
            joint, joined.inputs, num_fwd_outputs=num_fwd_outputs + len(extra), **joined.settings
        )
    _show_attention(forward)
    _show_attention(backward)
    if extra:
        _set_outputs(forward.graph, num_fwd_outputs, num_fwd_outputs + len(extra), [])
    drop_snapshots(forward)
    return forward, backward


# -- what the cut may do ---------------------------------------------------------------------------


def _cut(memory_budget: float) -> AbstractContextManager[Any]:
    """Return a context with the settings of AOTAutograd's min-cut; see the module."""
    budget = min(memory_budget, functorch_config.activation_memory_budget)
    patched: AbstractContextManager[Any] = functorch_config.patch(
        ban_recompute_materialized_backward=False,
        activation_memory_budget=max(budget, LEAST_BUDGET),
        cse=False,  # `share_equal_calls` does that
    )
    return patched


def _save_what_is_not_free(nodes: NodeDefinitions) -> None:
    """Tag what the backward must not recompute, unless checkpointing has tagged it."""
    compared = _compared_with_extremes(nodes)
    for node in nodes.gm.graph.nodes:
        untagged = node.op == "call_function" and "recompute" not in node.meta
        drawn = draws_random_numbers(node.target)
        if untagged and (_is_converted_input(node) or drawn or node in compared):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _leave_constants_to_the_last(joint: fx.Graph) -> None:
    """Move nodes that depend on no input, such as a mask, to the last checkpoint.

    Equal nodes are merged before the cut, which saves values that one checkpoint computes and a
    later one reads (with torch 2.11 constants, too). The last checkpoint has none after it.
    """
    numbers = [node.meta["ac_graph_id"] for node in joint.nodes if "ac_graph_id" in node.meta]
    constant: set[fx.Node] = set()
    for node in joint.nodes:
        called = node.op == "call_function" and not draws_random_numbers(node.target)
        if numbers and called and constant.issuperset(node.all_input_nodes):
            constant.add(node)
            if "ac_graph_id" in node.meta:
                node.meta["ac_graph_id"] = max(numbers)


def _compared_with_extremes(nodes: NodeDefinitions) -> set[fx.Node]:
    """Return the operands of maxima and minima that a node compares with other values."""
    found: set[fx.Node] = set()
    for node in nodes.gm.graph.find_nodes(op="call_function", target=aten.eq.Tensor):
        lines = [line for side in node.all_input_nodes for line in nodes.of(_source(side, nodes))]
        extremes = [r for d in lines for r in reductions(d.expr) if r.monoid in (MAX, MIN)]
        read = [nodes.node_of.get(load.buffer) for r in extremes for load in loads(r.bodies)]
        found.update(_source(one, nodes) for one in read if one is not None)
    return found


def _source(node: fx.Node, nodes: NodeDefinitions) -> fx.Node:
    """Return the source of a node, through views, copies and absolute values of one type."""
    match nodes.of(node):
        case [line]:
            value = line.expr
            while isinstance(value, Cast) or (isinstance(value, Op) and value.name == "abs"):
                (value,) = value.children
            if isinstance(value, Load) and value.dtype is line.expr.dtype:
                return _source(nodes.node_of[value.buffer], nodes)
    return node


def _is_converted_input(node: fx.Node) -> bool:
    """Return True for a matrix that is a copy of an input in 16 bits, as autocast's weights are."""
    source = node.args[0] if node.target is aten._to_copy.default else None
    if not isinstance(source, fx.Node) or source.op != "placeholder" or is_tangent(source):
        return False
    value = tensor_of(node)
    if value is None or value.dim() < 2:
        return False
    return value.dtype in (torch.float16, torch.bfloat16)


def _hide_attention(joint: fx.Graph) -> None:
    """Hide from the partitioner that checkpointed attention without dropout is tagged as random.

    Each of these operations is tagged, whatever its probability. To recompute one the partitioner
    would store the generator's state, in calls that hide the operation from fusec.
    """
    for node in joint.nodes:
        tagged = node.meta.get("recompute") in _AGAIN and draws_random_numbers(node.target)
        if tagged and named_arguments(node).get("dropout_p") == 0:
            node.target = _without_tags(node.target)


def _show_attention(graph: fx.GraphModule) -> None:
    hidden = [n for n in graph.graph.nodes if hasattr(n.target, "shown")]
    for node in hidden:
        node.target = node.target.shown
    if hidden:
        graph.recompile()


_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@functools.cache
def _without_tags(operation: Any) -> Callable[..., Any]:
    """Return an untagged function that calls an operation; ``shown`` is the operation."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        return operation(*args, **kwargs)

    plain.shown = operation  # type: ignore[attr-defined]
    return plain


# -- expansions ------------------------------------------------------------------------------------


def find_expansions(
    nodes: NodeDefinitions, tuning: FusionTuning, threshold: int, *, scores: bool = False
) -> dict[fx.Node, list[fx.Node]]:
    """Return the products of at least ``threshold`` bytes that expand their rows and are reduced.

    Each comes with the pointwise results that are as large. Products that the graph returns are
    left out: they have to be in memory anyhow.

    Args:
        scores: products of batches, which attentions have, instead of products of two matrices.
    """
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes.gm.graph.nodes:
        if _is_product_of(node, 2 + scores):
            columns, terms = _columns(node), _columns(node.args[0])
            if is_expansion(columns, terms, _size(node), threshold, tuning):
                large = reach((node,), partial(_pointwise_users, nodes, _numel(node)))
                pairs = [(user, source) for source in large for user in source.users]
                returned = any(user.op == "output" for user, _ in pairs)
                if not returned and any(_reduces(*pair, nodes, rows=not scores) for pair in pairs):
                    found[node] = large
    return found


def products_of_expansions(
    gm: fx.GraphModule, tuning: FusionTuning, threshold: int
) -> frozenset[fx.Node]:
    """Return the products that make or read values as large as an expansion, which is in chunks.

    Args:
        threshold: as of ``find_expansions``; 0: there are none.
    """
    if not threshold:
        return frozenset()
    least = min(map(_numel, find_expansions(NodeDefinitions(gm), tuning, threshold)), default=0)
    if not least:
        return frozenset()
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and is_product(n.target)]
    return frozenset(n for n in nodes if any(_numel(x) >= least for x in (n, *n.all_input_nodes)))


def _is_product_of(node: fx.Node, rank: int) -> bool:
    """Return True for a product whose result and first operand, no bias, have so many axes."""
    tensors = [tensor_of(x) for x in (node, *node.args[:1])] if is_product(node.target) else []
    return bool(tensors) and all(t is not None and t.dim() == rank for t in tensors)


def _pointwise_users(nodes: NodeDefinitions, least: int, source: fx.Node) -> list[fx.Node]:
    """Return the pointwise users of a node, and its views, of at least so many elements."""
    large = [n for n in source.users if _numel(n) >= least and not is_product(n.target)]
    lines = {user: nodes.of(user) for user in large}
    return [n for n in large if lines[n] and not any(reductions(d.expr) for d in lines[n])]


def _reduces(user: fx.Node, source: fx.Node, nodes: NodeDefinitions, *, rows: bool) -> bool:
    """Return True if a node, but no product, reduces another: ``rows``, or along any axis."""
    return not is_product(user.target) and any(
        nodes.node_of.get(load.buffer) is source
        and any(not i.axes.isdisjoint(node.over) for i in load.indices[-1 if rows else 0 :])
        for line in nodes.of(user)
        for node in reductions(line.expr)
        for load in loads(node.bodies)
    )


def recompute_scores(joint: fx.GraphModule, machine: Machine) -> None:
    """Tag the scores of attentions, and values of their size, for recomputation in the backward.

    For kernels that never store them (``passes/graph/recompute.py``). Element types that kernels
    would widen to f32 are left out.
    """
    kept = [to_torch_dtype(kind) for kind in machine.widened]
    backward, tuning = _tangent_users(joint.graph), machine.fusion
    found = find_expansions(NodeDefinitions(joint), tuning, tuning.scores_bytes, scores=True)
    for node, large in found.items():
        if _columns(node.args[0]) <= machine.lanes and node.meta["val"].dtype not in kept:
            recompute(set(large) - backward)


def recompute(nodes: Collection[fx.Node]) -> None:
    """Tag nodes of the forward so that the backward recomputes them."""
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = 0


def _numel(node: Any) -> int:
    """Return the elements of a node's tensor, at the hints of symbolic sizes."""
    value = tensor_of(node)
    return 0 if value is None else count_elements(value)


def _columns(node: Any) -> int:
    return hint_of(node.meta["val"].shape[-1])


def _size(node: fx.Node) -> int:
    return count_bytes(node.meta["val"])


# -- gradients in the forward ----------------------------------------------------------------------


def _tangent_users(joint: fx.Graph) -> set[fx.Node]:
    """Return the tangents, and the nodes that depend on one."""
    return set(reach(filter(is_tangent, joint.nodes), lambda node: node.users))


def hoist_gradients(nodes: NodeDefinitions, large: set[fx.Node], most: int) -> list[fx.Node] | None:
    """Compute the gradients behind large nodes for a scalar of 1; scale them where they are read.

    ``dx = f(s)`` becomes ``unit = f(1)``, which the forward can compute, and ``dx = unit * s``.

    Args:
        most: bytes of gradients above which it is better to save the expansion.
    Returns:
        The gradients that the forward computes; [], with nothing changed, if they are larger
        than ``most``; None if there is no such scalar.
    """
    joint = nodes.gm.graph
    backward = _tangent_users(joint)
    gradients = [n for n in joint.nodes if n in backward and n in large]
    leaving = _leaving(joint, gradients)
    values = [tensor_of(node) for node in leaving]
    if not values or any(value is None or value.dtype is torch.float16 for value in values):
        return None
    if sum(map(_size, leaving)) > most:
        return []
    for scalar in (n for n in joint.nodes if n in backward and _is_scalar(n)):
        inside = _between(nodes, scalar, leaving, backward)
        if inside is not None:
            return _hoist(joint, scalar, inside, leaving)
    return None


def _leaving(joint: fx.Graph, gradients: list[fx.Node]) -> list[fx.Node]:
    """Return the smaller tensors computed from large gradients: those of rows, weights and bias."""
    users = {user for node in gradients for user in node.users}
    if any(n.op == "output" for n in users):
        return []
    # With their producers, such as the sum over a row's gradient.
    inner = set(reach(gradients, lambda node: node.all_input_nodes))
    return [n for n in joint.nodes if n in users and n not in inner]


def _is_scalar(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dim() == 0 and value.dtype.is_floating_point


def _between(
    nodes: NodeDefinitions, scalar: fx.Node, leaving: list[fx.Node], backward: set[fx.Node]
) -> list[fx.Node] | None:
    """Return the nodes from the scalar to ``leaving``; None if one is not linear in the scalar."""
    known = backward - {scalar}
    found = reach(leaving, lambda node: known.intersection(node.all_input_nodes))
    inside = sorted(found)  # in the graph's order
    return inside if all(_is_linear(node, nodes, backward) for node in inside) else None


def _is_linear(node: fx.Node, nodes: NodeDefinitions, backward: set[fx.Node]) -> bool:
    """Return True if a node is a multiple of the scalar where its inputs in the backward are."""
    lines = nodes.of(node)
    sources = {b for line in lines for b in line.reads if nodes.node_of.get(b) in backward}
    for line in lines:
        if line is lines[-1] or not sources.isdisjoint(line.reads):
            if not is_linear(line.expr, sources):
                return False
            sources.add(line.buffer)
    return bool(lines)


def _hoist(
    joint: fx.Graph, scalar: fx.Node, inside: list[fx.Node], leaving: list[fx.Node]
) -> list[fx.Node]:
    value = tensor_of(scalar)
    assert value is not None
    with joint.inserting_before(inside[0]):
        one = joint.call_function(
            aten.full.default, ([], 1.0), {"dtype": value.dtype, "device": value.device}
        )
        one.meta["val"] = value
    unit: dict[fx.Node, fx.Node] = {scalar: one}
    for node in inside:
        with joint.inserting_before(node):
            unit[node] = joint.node_copy(node, lambda n: unit.get(n, n))
        for tag in ("partitioner_tag", "recompute"):
            unit[node].meta.pop(tag, None)
    for node in leaving:
        with joint.inserting_after(node):
            scaled = joint.call_function(aten.mul.Tensor, (unit[node], scalar))
            scaled.meta.update(node.meta)
        node.replace_all_uses_with(scaled)
        unit[node].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return [unit[node] for node in leaving]


# -- outputs ---------------------------------------------------------------------------------------


def _set_outputs(graph: fx.Graph, first: int, end: int, values: list[fx.Node]) -> None:
    """Replace some outputs of a graph, between two positions."""
    output = graph.output_node()
    given: Any = output.args[0]
    output.args = ((*given[:first], *values, *given[end:]),)
    for name in ("desc", "output_stack_traces"):
        if name in output.meta:
            known = list(output.meta[name])
            output.meta[name] = [*known[:first], *(None for _ in values), *known[end:]]
