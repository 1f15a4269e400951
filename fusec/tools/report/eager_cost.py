"""Count the cost of eager execution: the ATen operations it dispatches and the bytes they move.

Counted on the graph that Dynamo captured, before any decomposition, while it runs on fake tensors:
one launch for each operation that computes, its tensor inputs and outputs once each as traffic.
Views, metadata and uninitialised memory cost nothing.

Worked example: ``layer_norm(x + r)`` is two launches, ``add`` and ``native_layer_norm``, that read
x, r, the sum, weight and bias, and write the sum, the result, mean and rstd.

Each call has its module and the user's line: in a forward those of the node that runs; in a
backward those of the node that made the gradient function, from that function's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusec.errors import ModelError
from fusec.frontend.fx_passes.flex_attention import decomposed_flex_attention, is_flex_attention
from fusec.frontend.fx_passes.fx_nodes import hint_of, is_tangent
from fusec.frontend.origin import module_path, op_name, origin_of
from fusec.frontend.size_facts import UNSEEN
from fusec.ir.expr import reach
from fusec.passes.traffic import GATHERS
from fusec.torch_interior import (
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    gradient_function,
    tensors_in,
)

_FREE = {
    "_unsafe_view", "_reshape_alias", "lift_fresh", "lift_fresh_copy", "detach", "set_",
    "resize_", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
    "new_empty_strided", "_local_scalar_dense",
}  # fmt: skip
_OVERWRITES = {"copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_"}
"""Operations that write their first argument without reading it."""
_ONE_TYPE = {"mm", "addmm", "bmm", "baddbmm", "convolution"}
"""Operations whose eager kernels reject tensors of several types, which fake tensors accept."""


_PLACE = "fusec_place"
"""The key of a place in the metadata of a gradient function."""


@dataclass(frozen=True, slots=True)
class EagerCall:
    """One launch of eager execution: the operation, its bytes, its module and the user's line."""

    op: str
    bytes: int
    module: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class EagerCost:
    """Kernels that eager execution launches, and the bytes that they read and write."""

    calls: tuple[EagerCall, ...] = ()

    @property
    def launches(self) -> int:
        return len(self.calls)

    @property
    def bytes(self) -> int:
        return sum(call.bytes for call in self.calls)


class _Counter(TorchDispatchMode):
    """Counts the dispatched operations while active, except inside higher-order operations.

    Attributes:
        place: (module, line) of the node that runs, where no gradient function has its own.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[EagerCall] = []
        self.place = ("", "")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _any_number(args[0])
        if is_flex_attention(func):  # its eager kernel is Python: count the calls in it
            with self:
                return decomposed_flex_attention(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.higher_order.scan, torch.ops.higher_order.map_impl):
            self.count_steps(*args)
        if func is torch.ops.higher_order.while_loop:
            self.count_iteration(*args)
        if isinstance(func, HigherOrderOperator):
            return result
        _check_types(func, args)
        if _computes(func, result):
            function = gradient_function()
            kept = {} if function is None else function.metadata
            traffic = _traffic(func, args, kwargs or {}, result)
            self.calls.append(EagerCall(op_name(func), traffic, *kept.get(_PLACE, self.place)))
        return result

    def count_steps(self, step: Callable[..., Any], *groups: Any) -> None:
        """Count the operations of a loop's step as often as eager runs it."""
        known, (*states, xs, captured) = len(self.calls), groups
        with self:
            step(
                *(one for init in states for one in init), *(x.select(0, 0) for x in xs), *captured
            )
        self.calls += self.calls[known:] * (hint_of(xs[0].shape[0], UNSEEN) - 1)

    def count_iteration(
        self,
        condition: Callable[..., Any],
        body: Callable[..., Any],
        carried: Sequence[Any],
        captured: Sequence[Any],
    ) -> None:
        """Count the operations of one iteration of a loop, which nothing says how often it runs."""
        with self:
            condition(*carried, *captured)
            body(*carried, *captured)

    @property
    def cost(self) -> EagerCost:
        return EagerCost(tuple(self.calls))


class _Walk(fx.Interpreter):
    """Runs a graph, and sets each node's place in the counter and in its gradient functions."""

    def __init__(self, graph: fx.GraphModule, counter: _Counter) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # errors are the model's own
        self.counter = counter

    def run_node(self, n: fx.Node) -> Any:
        place = module_path(n), next(iter(origin_of(n).source), "")
        self.counter.place = place
        result = super().run_node(n)
        waiting: list[Any] = [tensor.grad_fn for tensor in tensors_in(result)]
        while waiting:
            function = waiting.pop()
            if function is not None and _PLACE not in function.metadata:
                function.metadata[_PLACE] = place
                waiting += [following for following, _ in function.next_functions]
        return result


def _any_number(tensor: torch.Tensor) -> Any:
    """Return a number in place of ``tensor.item()``: costs follow from shapes.

    With symbolic sizes, Dynamo passes a module's floats as tensors and reads them back.
    """
    if tensor.is_floating_point():
        return 1.0
    return True if tensor.dtype is torch.bool else 1


def _check_types(func: Any, args: tuple[Any, ...]) -> None:
    """Raise the error that an eager matrix product raises for tensors of several types."""
    if func._schema.name.removeprefix("aten::") not in _ONE_TYPE:
        return
    dtypes = list(dict.fromkeys(str(tensor.dtype) for tensor in tensors_in(args)))
    if len(dtypes) > 1:
        raise ModelError(f"RuntimeError: {func} of {' and '.join(dtypes)}: give it one type")


def _computes(func: Any, result: Any) -> bool:
    """Return True for a call that computes a tensor, be it an empty one."""
    if not isinstance(func, OpOverload) or func.namespace == "prim":
        return False
    name = func._schema.name.partition("::")[2]
    free = func.is_view or name in _FREE or torch.Tag.inplace_view in func.tags
    return bool(tensors_in(result)) and not free


def _traffic(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the bytes that one call reads and writes; 0 if all that comes out is empty."""
    name = func._schema.name.partition("::")[2]
    written = sum(map(tensor_bytes, tensors_in(result)))
    inputs = tensors_in((args, kwargs))
    if name in _OVERWRITES:
        inputs = inputs[1:]
    sizes = [tensor_bytes(t) for t in inputs]
    if name in GATHERS and sizes:
        sizes[0] = min(sizes[0], written)
    return written + sum(sizes) if written else 0


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements: expanded axes count once."""
    if tensor.layout is not torch.strided:
        return int(tensor.numel()) * tensor.element_size()
    total = tensor.element_size()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        seen = hint_of(extent, UNSEEN)
        if not (type(stride) is int and stride == 0) or seen == 0:
            total *= seen
    return total


def count_eager(run: Callable[..., Any], inputs: Sequence[Any]) -> tuple[EagerCost, EagerCost]:
    """Return the eager cost of a call of ``run``, and that of its backward.

    Assumes that ``inputs`` are fake tensors and numbers. The backward is empty where nothing
    requires a gradient, and ends at the inputs, whatever graph made them.
    """
    inputs = list(map(_apart, inputs))
    with _Counter() as forward:
        walk = _Walk(run, forward).run if isinstance(run, fx.GraphModule) else run
        result = walk(*inputs)
    roots = [t for t in tensors_in(result) if t.requires_grad and t.grad_fn is not None]
    leaves = [t for t in tensors_in(tuple(inputs)) if t.requires_grad]
    backward = _Counter()
    if roots and leaves:
        gradients = [torch.empty_like(root) for root in roots]
        with backward:
            torch.autograd.grad(roots, leaves, gradients, allow_unused=True)
    return forward.cost, backward.cost


def _apart(value: Any) -> Any:
    """Return a tensor detached from its gradient function; any other value as it is."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    return value.detach().requires_grad_().clone()  # no leaf: it may be written in place


def graph_cost(graph: fx.GraphModule) -> EagerCost:
    """Return the eager cost of the program that an ATen graph comes from.

    The nodes that an operation was decomposed into count as one call, which reads their inputs and
    writes the results that other nodes read. In a backward, nodes that no tangent reaches are
    recomputed and do not count: eager has saved them in the forward.
    """
    computing = [node for node, _ in node_costs(graph)]
    if any(map(is_tangent, graph.graph.nodes)):
        gradients = set(reach(filter(is_tangent, graph.graph.nodes), lambda node: node.users))
        computing = [node for node in computing if node in gradients]
    wholes = _wholes(graph)
    members: dict[fx.Node, set[fx.Node]] = {}
    for node, whole in wholes.items():
        members.setdefault(whole, set()).add(node)
    calls = {wholes[node]: node for node in reversed(computing)}  # the first of each that computes
    return EagerCost(tuple(_whole_call(calls[w], members[w]) for w in members if w in calls))


def _wholes(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Map each node to the first node of the program's operation that it is a part of.

    Autograd numbers operations; without it, those of one line share a number, and a repetition of
    the same nodes is the operation's next call.
    """
    alike: dict[object, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            alone = str(node.meta.get("original_aten")) in ("None", str(node.target))
            alike.setdefault(node if alone else _whole_of(node), []).append(node)
    steps = ((some, _period(some)) for some in alike.values())
    return {node: some[k - k % step] for some, step in steps for k, node in enumerate(some)}


def _whole_of(node: fx.Node) -> tuple[object, ...]:
    """Return a key of a node's operation in the program, by name, as graphs may be copies."""
    meta = node.meta
    whole, number = str(meta.get("original_aten")), meta.get("seq_nr")
    return whole, number, meta.get("stack_trace"), module_path(node)


def _period(nodes: Sequence[fx.Node]) -> int:
    """Return the period of the nodes' targets: the number of nodes, if they do not repeat."""
    targets = [str(node.target) for node in nodes]
    steps = (n for n in range(2, len(targets)) if len(targets) % n == 0)
    return next((n for n in steps if targets == targets[:n] * (len(targets) // n)), len(targets))


def _whole_call(first: fx.Node, members: set[fx.Node]) -> EagerCall:
    """Return the eager call that nodes are parts of; ``first`` is the first that computes."""
    whole = first.meta.get("original_aten") if len(members) > 1 else None
    read = {source for node in members for source in node.all_input_nodes} - members
    written = {node for node in members if any(user not in members for user in node.users)}
    values = [node.meta.get("val") for node in read | written]
    moved = sum(map(tensor_bytes, tensors_in(values)))
    if whole is None:
        args, kwargs = fx.map_arg((first.args, first.kwargs), lambda n: n.meta.get("val"))
        moved = _traffic(first.target, args, kwargs, first.meta.get("val"))
    line = next(iter(origin_of(first).source), "")
    return EagerCall(op_name(whole or first.target), moved, module_path(first), line)


def node_costs(graph: fx.GraphModule) -> list[tuple[fx.Node, int]]:
    """Return the nodes of an ATen graph that compute, with the bytes that each moves."""
    found = []
    for node in graph.graph.nodes:
        result = node.meta.get("val")
        if node.op == "call_function" and _computes(node.target, result):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            found.append((node, _traffic(node.target, args, kwargs, result)))
    return found
