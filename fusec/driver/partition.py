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

Both are legal for any graph: the first by the linearity of each operation in ``_FIRST``,
``_EITHER`` and ``_BOTH``, checked node by node. Gradients in f16, which has five bits of exponent,
are never computed in the forward: they may need the scale that a loss scaler puts into the scalar.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusec.frontend.aliasing.snapshots import drop_snapshots, take_snapshots
from fusec.frontend.fallbacks import draws_random_numbers, talks_to_ranks
from fusec.frontend.fx_passes.equal_calls import share_equal_calls
from fusec.frontend.fx_passes.fx_nodes import count_bytes, count_elements, hint_of, tensor_of
from fusec.frontend.origin import name_by_forward
from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.machine import FusionTuning, Machine
from fusec.torch_interior import functorch_config, min_cut_rematerialization_partition

aten = torch.ops.aten

PRODUCTS = (aten.mm.default,)
"""Products that may be expansions; attention's (``bmm``) are left to ``recompute_scores``."""

_EXTREMES = (
    *(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default),
    aten.linalg_vector_norm.default,
)
_SAME_BITS = (
    *(aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.expand.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten._unsafe_view.default, aten.permute.default),
    *(aten.abs.default, aten.detach.default, aten.alias.default, aten.clone.default),
)

LEAST_BUDGET = 1e-6
"""Stands for a budget of 0, at which AOTAutograd saves inputs alone, not even random draws."""

_SAME_ROW = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor,
    aten.div.Scalar, aten.neg.default, aten.exp.default, aten.tanh.default, aten.alias.default,
    aten._to_copy.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.clone.default, aten.where.self, aten.add.Scalar, aten.sub.Scalar,
}  # fmt: skip
"""Pointwise operations and views, through which an expansion is followed."""
_TRANSPOSES = {
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dims, aten.expand.default,
}  # fmt: skip
"""Further operations through which scores are followed: they need not keep rows whole."""
_REDUCTIONS = {
    aten.amax.default, aten.sum.dim_IntList, aten.max.dim, aten.mean.dim, aten.gather.default,
    aten.argmax.default,
}  # fmt: skip
"""Operations that reduce an expansion."""


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
    name_by_forward(set(joint.graph.nodes) - _tangent_users(joint.graph))
    if chunk_bytes and (found := find_expansions(joint.graph, tuning, chunk_bytes)):
        large, size = _large(found), sum(map(_size, found))
        early = hoist_gradients(joint.graph, large, size)
        if early:
            extra.extend(early)
        elif early is None and size >= tuning.chunk_recomputed * chunk_bytes:
            recompute(large - _tangent_users(joint.graph))
    _save_what_is_not_free(joint.graph)
    _leave_constants_to_the_last(joint.graph)
    _hide_attention(joint.graph)
    extra.extend(take_snapshots(joint.graph, num_fwd_outputs))
    _add_outputs(joint.graph, num_fwd_outputs, extra)
    if functorch_config.cse and not _names_sizes(joint.graph):
        share_equal_calls(joint.graph)
        joint.graph.set_codegen(fx.graph.CodeGen())  # arguments by name, not as nested lists
    with _cut(memory_budget):
        forward, backward = min_cut_rematerialization_partition(
            joint,
            joined.inputs,
            num_fwd_outputs=num_fwd_outputs + len(extra),
            **joined.settings,
        )
    _show_attention(forward)
    _show_attention(backward)
    if extra:
        _drop_outputs(forward, num_fwd_outputs, len(extra))
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


def _names_sizes(joint: fx.Graph) -> bool:
    """Return True if a call binds a symbol for a size that depends on data.

    Equal calls bind different symbols: if they were merged, later nodes would use unbound ones.
    """
    return any(node.meta.get("unbacked_bindings") for node in joint.nodes)


def _save_what_is_not_free(joint: fx.Graph) -> None:
    """Tag what the backward must not recompute, unless checkpointing has tagged it."""
    compared = {_compared_with_extreme(node) for node in joint.nodes}
    for node in joint.nodes:
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


def _compared_with_extreme(node: fx.Node) -> fx.Node | None:
    """Return the operand that a node compares with its own maximum or minimum, or None."""
    if node.target is not aten.eq.Tensor:
        return None
    sides = [_seen_through(arg) for arg in node.args]
    for one, other in (sides, sides[::-1]):
        if one is None or other is None or other.target not in _EXTREMES:
            continue
        if one is _seen_through(other.args[0]):
            return one
    return None


def _seen_through(arg: Any) -> fx.Node | None:
    """Return the source of an argument, through views, copies and ``abs``."""
    while isinstance(arg, fx.Node) and arg.target in _SAME_BITS:
        arg = arg.args[0]
    return arg if isinstance(arg, fx.Node) else None


def _is_converted_input(node: fx.Node) -> bool:
    """Return True for a matrix that is a copy of an input in 16 bits, as autocast's weights are."""
    source = node.args[0] if node.target is aten._to_copy.default else None
    if not isinstance(source, fx.Node) or source.op != "placeholder" or _is_tangent(source):
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
        tagged = node.meta.get("recompute") in _AGAIN
        if tagged and draws_random_numbers(node.target) and _argument(node, "dropout_p") == 0:
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


def _argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an operation by its name, or its default; None if there is none."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            given = node.args[position] if position < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return None


# -- expansions ------------------------------------------------------------------------------------


def find_expansions(
    joint: fx.Graph, tuning: FusionTuning, threshold: int, products: Collection[Any] = PRODUCTS
) -> set[fx.Node]:
    """Return the products of at least ``threshold`` bytes that expand their rows and are reduced.

    Products that the graph returns are left out: they have to be in memory anyhow.
    """
    found: set[fx.Node] = set()
    for node in joint.nodes:
        if node.target not in products or node.op != "call_function":
            continue
        rows = node.args[0]
        wide = _columns(node) >= tuning.chunk_ratio * _columns(rows)
        transposed = _TRANSPOSES if node.target is aten.bmm.default else set()
        if wide and _size(node) >= threshold and _is_reduced(node, _SAME_ROW | transposed):
            found.add(node)
    return found


def _is_reduced(product: fx.Node, kept: Collection[Any]) -> bool:
    """Return True if a reduction reads the product or its pointwise results, and no output does."""
    waiting, seen, reduced = [product], {product}, False
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                return False
            reduced = reduced or user.target in _REDUCTIONS
            if user.target in kept and user not in seen and _numel(user) >= _numel(product):
                seen.add(user)
                waiting.append(user)
    return reduced


def _large(expansions: set[fx.Node]) -> set[fx.Node]:
    """Return the expansions, and the results computed from them that are as large."""
    found, waiting = set(expansions), list(expansions)
    least = min(map(_numel, expansions))
    while waiting:
        for user in waiting.pop().users:
            pointwise = user.op == "call_function" and user.target not in PRODUCTS
            pointwise = pointwise and not talks_to_ranks(user.target)  # sent once, never again
            if pointwise and user not in found and _numel(user) >= least:
                found.add(user)
                waiting.append(user)
    return found


def recompute_scores(joint: fx.GraphModule, machine: Machine) -> fx.GraphModule:
    """Tag the scores of attentions, and values of their size, for recomputation in the backward.

    For kernels that never store them (``passes/graph/recompute.py``). Element types that kernels
    would widen to f32 are left out.
    """
    graph, tuning = joint.graph, machine.fusion
    kept = [to_torch_dtype(kind) for kind in machine.widened]
    found = {
        n
        for n in find_expansions(graph, tuning, tuning.scores_bytes, (aten.bmm.default,))
        if _columns(n.args[0]) <= machine.lanes and _dtype(n) not in kept
    }
    if found:
        recompute(_large(found) - _tangent_users(graph))
    return joint


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
    value = tensor_of(node)
    return hint_of(value.shape[-1]) if value is not None and value.dim() else 1


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = tensor_of(node)
    return value.dtype if value is not None else None


def _size(node: fx.Node) -> int:
    value = tensor_of(node)
    return 0 if value is None else count_bytes(value)


# -- gradients in the forward ----------------------------------------------------------------------


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def _tangent_users(joint: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on a tangent."""
    found: set[fx.Node] = set()
    for node in joint.nodes:
        if _is_tangent(node) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def hoist_gradients(joint: fx.Graph, large: set[fx.Node], most: int) -> list[fx.Node] | None:
    """Compute the gradients behind large nodes for a scalar of 1; scale them where they are read.

    ``dx = f(s)`` becomes ``unit = f(1)``, which the forward can compute, and ``dx = unit * s``.

    Args:
        most: bytes of gradients above which it is better to save the expansion.
    Returns:
        The gradients that the forward computes; [], with nothing changed, if they are larger
        than ``most``; None if there is no such scalar.
    """
    backward = _tangent_users(joint)
    gradients = [n for n in joint.nodes if n in backward and n in large]
    leaving = _leaving(joint, gradients, large)
    if not leaving or any(tensor_of(n) is None or _is_f16(n) for n in leaving):
        return None
    if sum(map(_size, leaving)) > most:
        return []
    for scalar in (n for n in joint.nodes if n in backward and _is_scalar(n)):
        inside = _between(joint, scalar, leaving, backward)
        if inside is not None:
            return _hoist(joint, scalar, inside, leaving)
    return None


def _leaving(joint: fx.Graph, gradients: list[fx.Node], large: set[fx.Node]) -> list[fx.Node]:
    """Return the smaller tensors computed from large gradients: those of rows, weights and bias."""
    users = {user for node in gradients for user in node.users}
    if any(n.op == "output" for n in users):
        return []
    inner = set(gradients)  # and their producers, such as the sum over a row's gradient
    for node in reversed(joint.nodes):
        if any(user in inner for user in node.users):
            inner.add(node)
    return [n for n in joint.nodes if n in users and n not in inner]


def _is_scalar(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dim() == 0 and value.dtype.is_floating_point


def _is_f16(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype is torch.float16


def _between(
    joint: fx.Graph, scalar: fx.Node, leaving: list[fx.Node], backward: set[fx.Node]
) -> list[fx.Node] | None:
    """Return the nodes from the scalar to ``leaving``; None if one is not linear in the scalar."""
    needed: set[fx.Node] = set()
    waiting = list(leaving)
    while waiting:
        node = waiting.pop()
        if node in needed or node not in backward or node is scalar:
            continue
        if node.op != "call_function":  # another tangent
            return None
        needed.add(node)
        waiting.extend(node.all_input_nodes)
    inside = [n for n in joint.nodes if n in needed]
    linear = {scalar}
    for node in inside:
        if not _is_linear(node, linear, backward):
            return None
        linear.add(node)
    return inside


_FIRST = {
    aten.neg.default, aten.expand.default, aten.view.default, aten.reshape.default,
    aten._unsafe_view.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dims,
    aten.sum.dim_IntList, aten.mul.Scalar, aten.div.Scalar, aten.alias.default, aten.clone.default,
    aten._to_copy.default, aten.div.Tensor, aten.mean.dim,
}  # fmt: skip
"""Linear in the first argument, where no other depends on the scalar."""
_EITHER = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}
"""Linear in each of two arguments, where the other does not depend on the scalar."""
_BOTH = {aten.add.Tensor, aten.sub.Tensor}
"""Linear where both arguments are."""


def _is_linear(node: fx.Node, linear: set[fx.Node], backward: set[fx.Node]) -> bool:
    """Return True if a node is a multiple of the scalar, given which of its inputs are."""
    moving = [a for a in node.all_input_nodes if a in backward]
    if not moving or any(a not in linear for a in moving):
        return False
    value = tensor_of(node)
    if value is None or not value.dtype.is_floating_point:
        return False
    args = node.args
    if node.target in _FIRST:
        return moving == [args[0]] and (len(args) < 2 or args[1] is not args[0])
    if node.target in _EITHER:
        return len(moving) == 1 and args[0] is not args[1]
    if node.target in _BOTH:
        return all(a in linear for a in args[:2])
    if node.target is aten.where.self:
        return args[0] not in linear and all(a in linear or _is_zero(a) for a in args[1:])
    if node.target is aten.scatter.src:
        return all(a in linear or _is_zero(a) for a in (args[0], args[3])) and args[2] not in linear
    return False


def _is_zero(node: Any) -> bool:
    """Return True for a tensor of zeros, made by one of the operations that make them."""
    if not isinstance(node, fx.Node):
        return bool(node == 0)
    match node.target:
        case aten.scalar_tensor.default:
            return bool(node.args[0] == 0)
        case aten.full.default | aten.full_like.default:
            return bool(node.args[-1] == 0)
        case aten.expand.default | aten.view.default | aten._to_copy.default | aten.alias.default:
            return _is_zero(node.args[0])
        case _:
            return False


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


def _add_outputs(joint: fx.Graph, position: int, extra: list[fx.Node]) -> None:
    """Add tensors to the forward's outputs in a joint graph, so that they stay in the forward."""
    (output,) = joint.find_nodes(op="output")
    values = list(output.args[0])
    output.args = ((*values[:position], *extra, *values[position:]),)
    if "desc" in output.meta:
        known = list(output.meta["desc"])
        output.meta["desc"] = [*known[:position], *(None for _ in extra), *known[position:]]


def _drop_outputs(forward: fx.GraphModule, position: int, count: int) -> None:
    (output,) = forward.graph.find_nodes(op="output")
    values = list(output.args[0])
    output.args = ((*values[:position], *values[position + count :]),)
    for name in ("desc", "output_stack_traces"):
        if name in output.meta:
            known = list(output.meta[name])
            output.meta[name] = [*known[:position], *known[position + count :]]
    forward.recompile()
