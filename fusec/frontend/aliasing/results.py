"""Build a graph's results with the object identity and the aliasing that eager's results have.

Lowering keeps a value's elements by index. A caller sees more: which results are one object, which
share memory, and which of these autograd takes for views of each other. All of it is in the FX
graph. A node is one object. Nodes whose chains of views start at one *maker*, the node that owns
the memory, share that memory. A ``detach`` in the chain ends autograd's view: the result must not
have the history of the maker's tensor, and AOTAutograd marks results as without gradient by object.

Worked example, ``y = sin(x); return y, y.view(-1), y.detach(), y`` as it is printed::

    return (y, window(y, (6,), (1,), 0), y.detach(), y)

Assumes: traced tensors share a storage where eager's do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from fusec.errors import Unsupported
from fusec.frontend.forms import form_of
from fusec.frontend.fx_passes.fx_nodes import aten, call_like, count_elements, hint_of, tensor_of
from fusec.frontend.operands import Operands, have_one_type, share_memory
from fusec.frontend.value import TensorValue
from fusec.ir.expr import Buffer
from fusec.ir.graph import Argument, NodeConstant, OwnTensor, View
from fusec.torch_interior import OpOverload

PLACED = {aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default}
"""Their results keep their argument's storage offset. Where AOTAutograd cannot replay a view (its
sizes are symbolic), it recognises an output that is a view of an input by that offset, from that of
what the output is a view of."""


@dataclass(frozen=True, slots=True)
class _Lineage:
    """The origin of the memory of a node's tensor.

    Attributes:
        maker: the node that owns it: the call that allocates it, or an input.
        detached: whether a ``detach`` lies between: to autograd it is no view of the maker's.
    """

    maker: fx.Node
    detached: bool

    @classmethod
    def of(cls, node: fx.Node) -> _Lineage:
        detached = False
        while (source := _seen_by(node)) is not None:
            detached |= node.target is aten.detach.default
            node = source
        return cls(node, detached)


def detach_again(gm: fx.GraphModule) -> None:
    """Restore each ``detach`` that AOTAutograd's decompositions replaced by an ``alias``, a view.

    They replace it for the partitioner, to which an ``alias`` costs nothing.
    """
    aliases = gm.graph.find_nodes(op="call_function", target=aten.alias.default)
    for node in aliases:
        node.target = aten.detach.default
    if aliases:
        gm.recompile()


def own_results(gm: fx.GraphModule, count: int | None = None) -> None:
    """Detach results that are views of what the graph itself makes, so that users may write them.

    AOTAutograd knows which results are views in the program. Decompositions and rewrites make more
    of them, such as a product that is viewed in the shape of its rows; autograd refuses to write a
    view that was made inside a custom function, or without gradients.

    Results that share memory with each other are views of it to autograd, and stay so.

    Args:
        count: how many results a forward has before what it saves; by default all.
    """
    output = gm.graph.output_node()
    (returned,) = output.args
    if not isinstance(returned, tuple | list):
        return
    makers = {n: _Lineage.of(n).maker for n in returned[:count] if isinstance(n, fx.Node)}
    shared = Counter(makers.values())
    own: dict[fx.Node, fx.Node] = {}
    with gm.graph.inserting_before(output):
        for node, maker in makers.items():
            made = maker.op == "call_function" and maker.target not in PLACED
            if shared[maker] == 1 and maker is not node and made:
                own[node] = call_like(node, aten.detach.default, node)
    if own:
        kept = len(returned) if count is None else count
        output.args = (tuple(own.get(n, n) for n in returned[:kept]) + tuple(returned[kept:]),)  # type: ignore[arg-type]
        gm.recompile()


def separate_gradients(backward: fx.GraphModule) -> None:
    """Copy gradients that have elements in common, as eager's accumulation does.

    Autograd keeps the gradient of a leaf without a copy if nobody else has the tensor; of two that
    are views of one memory each is such. Parts of it, as of a ``cat``, may lie in it side by side.
    """
    output = backward.graph.output_node()
    (returned,) = output.args
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in dict.fromkeys(n for n in returned if isinstance(n, fx.Node)):  # type: ignore[union-attr]
        value = tensor_of(node)
        if value is not None and all(map(hint_of, value.stride())):  # an expanded one is copied
            found.setdefault(_Lineage.of(node).maker, []).append(node)
    own: dict[fx.Node, fx.Node] = {}
    with backward.graph.inserting_before(output):
        for maker, nodes in found.items():
            elements = [count_elements(n.meta["val"]) for n in (maker, *nodes)]
            for node in nodes[1:] if sum(elements[1:]) > elements[0] else ():
                own[node] = call_like(node, aten.clone.default, node)
    if own:
        output.args = (tuple(own.get(n, n) for n in returned),)  # type: ignore
        backward.recompile()


def results_of(operands: Operands, output: fx.Node) -> tuple[Argument, ...]:
    """Return a graph's results: windows with the traced strides, aliased as traced.

    Args:
        output: the FX graph's last node.
    Raises:
        Unsupported: for a result that is neither a tensor nor a size.
    """
    (returned,) = output.args
    items = returned if isinstance(returned, tuple | list) else (returned,)
    nodes = dict.fromkeys(item for item in items if isinstance(item, fx.Node))
    tensors = (node for node in nodes if isinstance(operands.env[node], TensorValue))
    lineages = {node: _Lineage.of(node) for node in tensors}
    views = _views(operands, lineages)
    made = _objects(lineages, views)
    results: list[Argument] = []
    for position, item in enumerate(items):
        if isinstance(item, fx.Node) and item in made:
            results.append(made[item])
        else:
            results.append(operands.for_extern(output, item, ("args", 0, position)))
    if any(isinstance(result, NodeConstant | tuple) for result in results):
        raise Unsupported("an output that is neither tensor nor size")
    return tuple(results)


def _seen_by(node: fx.Node) -> fx.Node | None:
    """Return the node of which a node's tensor is a view, or None if it has memory of its own."""
    call = node
    if call.op == "call_function" and not isinstance(call.target, OpOverload) and call.args:
        source = call.args[0]  # one of the results of a split
        call = source if isinstance(source, fx.Node) else call
    viewed = call.args[0] if call.args else None
    if not (isinstance(call.target, OpOverload) and isinstance(viewed, fx.Node)):
        return None
    base, own = tensor_of(viewed), tensor_of(node)
    together = base is not None and own is not None and share_memory(base, own)
    return viewed if call.target.is_view and together else None


def _views(operands: Operands, lineages: Mapping[fx.Node, _Lineage]) -> dict[fx.Node, View]:
    """Return the memory of each result: that of its maker, disjoint between makers."""
    handed_out: dict[Buffer, torch.Tensor] = {}
    homes: dict[fx.Node, View] = {}
    shared = Counter(one.maker for one in lineages.values())

    def apart(node: fx.Node) -> View:
        view, traced = operands.window(node), node.meta["val"]
        first = operands.foreign.get(view.buffer, traced)
        first = handed_out.setdefault(view.buffer, first)
        if first is not traced and not share_memory(first, traced):
            view = operands.copy(node, form_of(traced))
            handed_out[view.buffer] = traced
        return view

    def placed(node: fx.Node) -> View:
        maker, traced = lineages[node].maker, node.meta["val"]
        made = maker.meta["val"]
        alone = shared[maker] == 1 or maker.op != "call_function"
        if alone or not have_one_type(made, traced):  # ``view`` to another type
            return apart(node)
        if maker not in homes:  # placed once: by itself, a view may be lowered to other memory
            homes[maker] = apart(maker)
        return operands.window_of(homes[maker], made, traced)

    return {node: placed(node) for node in lineages}


def _objects(
    lineages: Mapping[fx.Node, _Lineage], views: Mapping[fx.Node, View]
) -> dict[fx.Node, View | OwnTensor]:
    """Return each node's result, such that no two nodes share a tensor object."""
    beside: dict[Buffer, list[fx.Node]] = {}
    for node, view in views.items():
        beside.setdefault(view.buffer, []).append(node)
    made: dict[fx.Node, View | OwnTensor] = {}
    taken: set[View | OwnTensor] = set()
    for nodes in beside.values():
        whole = [n for n in nodes if views[n].is_buffer and not lineages[n].detached]
        owner = next((n for n in whole if lineages[n].maker is n), None) or next(iter(whole), None)
        for node in nodes:
            view, detached = views[node], lineages[node].detached
            if view.is_buffer:
                plain = node is owner or len(nodes) == 1
            else:  # a tensor of its own, in the graph a window of what it was computed in
                detached |= lineages[node].maker is node and node.op == "call_function"
                plain = not detached
            free = plain and view not in taken
            made[node] = view if free else OwnTensor(view, detached, len(made))
            taken.add(made[node])
    return made
