"""Propagate the channels-last format through an FX graph: strides change, values do not.

``flow`` visits a graph of ATen operations in order. Before each convolution that is to run
channels-last it converts the image, and retraces all that follows, so that the consumers of a
convolution keep its format: norms, activations, pooling, sums, and in a joint graph the backward,
too. The graph's outputs have the strides that were traced before::

    y = convolution(x, w)             c = clone(x, channels_last);  y = convolution(c, w)
    z = relu(y)               becomes z = relu(y)
    return z                          r = clone(z, contiguous);     return r

A conversion is an ordinary pointwise operation, which fuses with its producer or its consumers.

The traced strides are also restored before operations that may depend on them: those that are not
ATen's, ``as_strided``, calls of attention, draws that follow eager's stream, and views that the new
strides do not allow. A view is restored by taking it again of its restored base, so that aliases
stay aliases.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fusec.frontend.fallbacks import draws_random_numbers
from fusec.frontend.fx_passes.fx_nodes import (
    call_like,
    fakes_of,
    has_strides,
    hint_of,
    is_view,
    value_of_call,
)
from fusec.frontend.ops.registry import aten
from fusec.frontend.origin import op_name
from fusec.torch_interior import FakeTensor, OpOverload

IMAGES: Mapping[Any, int] = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""Convolutions -> how many of their first arguments are images; the weights follow."""
_BY_STRIDES = {
    *(aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype),
    *(aten.sym_stride.int, aten.sym_storage_offset.default),
}
_CANNOT = (RuntimeError, ValueError, NotImplementedError)
"""Errors of tracing a view that strides do not allow, or an operation that needs others."""


def images_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a call that may be images, or lists of them: no weights."""
    return node.args[: IMAGES.get(node.target)]


def is_image(value: Any) -> bool:
    """Return True for a tensor [n, c, h, w] in memory."""
    return isinstance(value, FakeTensor) and value.dim() == 4 and value.layout is torch.strided


def is_last(value: Any) -> bool:
    """Return True for an image whose elements lie densely in the order n, h, w, c."""
    return is_image(value) and value.is_contiguous(memory_format=torch.channels_last)


def flow(gm: fx.GraphModule, chosen: Collection[fx.Node], *, eager_draws: bool) -> None:
    """Convert the images of convolutions, in place; nodes carry ``meta["val"]``.

    Args:
        chosen: convolutions that are to run channels-last.
        eager_draws: random numbers are eager's, which are drawn in the order of memory.
    """
    _walk(gm.graph, chosen, eager_draws)
    gm.recompile()


def conversions(
    graph: fx.Graph, chosen: Collection[fx.Node], *, eager_draws: bool
) -> list[torch.Tensor]:
    """Return the tensors that ``flow`` would convert; the graph stays as it is."""
    copied: dict[fx.Node, fx.Node] = {}
    trial = fx.Graph()
    trial.output(trial.graph_copy(graph, copied))
    made = _walk(trial, [copied[node] for node in chosen], eager_draws)
    return [node.meta["val"] for node in made if node.users]


def _walk(graph: fx.Graph, chosen: Collection[fx.Node], eager_draws: bool) -> list[fx.Node]:
    """Convert the images of convolutions; return the conversions."""
    walk = _Flow(graph, frozenset(chosen), eager_draws)
    # The graph is ATen: autocast was applied when it was first traced.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for node in list(graph.nodes):
            walk.visit(node)
    return walk.converted


class _Flow:
    """The state of one walk.

    Attributes:
        traced: node -> its original value, for nodes whose strides have changed.
        last, restored: node -> the node of its value in channels-last, and in its original strides.
        converted: the inserted conversions.
    """

    def __init__(self, graph: fx.Graph, chosen: Collection[fx.Node], eager_draws: bool) -> None:
        self.graph = graph
        self.chosen = chosen
        self.eager_draws = eager_draws
        self.traced: dict[fx.Node, Any] = {}
        self.last: dict[fx.Node, fx.Node] = {}
        self.restored: dict[fx.Node, fx.Node] = {}
        self.converted: list[fx.Node] = []

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            self.restore_all(node)
        elif node.op != "call_function":
            return
        elif node in self.chosen:
            self.convert(node, images_of(node))
            self.trace(node)
        elif any(source in self.traced for source in node.all_input_nodes):
            self.follow(node)

    def follow(self, node: fx.Node) -> None:
        """Retrace a node whose inputs have new strides, or restore these if the node needs them."""
        if node.target is aten.copy_.default:
            return  # into an input: the source's strides do not matter
        if not self.may_follow(node):
            self.restore_all(node)
            return
        if not is_view(node) and node.target is not operator.getitem:
            self.convert(node, images_of(node), alike=True)
        try:
            self.trace(node)
        except _CANNOT:
            self.restore_all(node)

    def may_follow(self, node: fx.Node) -> bool:
        """Return True for operations whose results depend on strides only in their own strides."""
        if node.target is operator.getitem:
            return True
        return (
            isinstance(node.target, OpOverload)
            and node.target.namespace == "aten"
            and node.target not in _BY_STRIDES
            and not node.target._schema.is_mutable
            and "attention" not in op_name(node.target)
            and not (self.eager_draws and draws_random_numbers(node.target))
            and not node.meta.get("unbacked_bindings")
        )

    def restore_all(self, node: fx.Node) -> None:
        """Let a node read its inputs with their original strides."""
        for source in node.all_input_nodes:
            if (restored := self.restore(source)) is not source:
                node.replace_input_with(source, restored)

    def convert(self, node: fx.Node, given: Iterable[Any], *, alike: bool = False) -> None:
        """Make arguments of a node channels-last.

        Args:
            alike: only contiguous ones, and only if another has changed: the first sets the format.
        """
        items = [one for item in given for one in (item if isinstance(item, list) else [item])]
        images = [i for i in items if isinstance(i, fx.Node) and is_image(i.meta.get("val"))]
        if alike and not any(image in self.traced for image in images):
            return
        for image in images:
            if not alike or image.meta["val"].is_contiguous():
                node.replace_input_with(image, self.as_last(image))

    # -- tracing ----------------------------------------------------------------------------------

    def trace(self, node: fx.Node) -> None:
        """Recompute a node's traced value from the present values of its arguments."""
        before = node.meta.get("val")
        if not fakes_of(before):
            return
        found = value_of_call(node)
        pairs = zip(fakes_of(before), fakes_of(found), strict=True)
        if not all(has_strides(x, y) for x, y in pairs):
            self.traced[node] = before
            node.meta["val"] = _changed(before, found)
            node.meta.pop("tensor_meta", None)

    # -- conversions ------------------------------------------------------------------------------

    def as_last(self, node: fx.Node) -> fx.Node:
        """Return a node's image in channels-last, converting it if necessary."""
        if is_last(node.meta["val"]):
            return node
        if node not in self.last:
            with self.graph.inserting_before(_behind(node)):
                self.last[node] = self.clone(node, torch.channels_last)
        return self.last[node]

    def restore(self, node: fx.Node) -> fx.Node:
        """Return a node's value with its original strides."""
        if node not in self.traced:
            return node
        if node not in self.restored:
            self.restored[node] = self.as_traced(node)
        return self.restored[node]

    def as_traced(self, node: fx.Node) -> fx.Node:
        before = self.traced[node]
        if is_view(node) or (node.target is operator.getitem and is_view(node.args[0])):
            bases = {source: self.restore(source) for source in node.all_input_nodes}
            args, kwargs = fx.map_arg((node.args, node.kwargs), bases.__getitem__)
            with self.graph.inserting_before(_behind(node)):
                return call_like(node, node.target, *args, **kwargs)
        if isinstance(before, torch.Tensor):
            with self.graph.inserting_before(_behind(node)):
                return self.copy(node, before)
        return node  # several results: restored at each getitem

    def copy(self, node: fx.Node, wanted: torch.Tensor) -> fx.Node:
        """Insert a copy of a value with the strides of another tensor, which has no gaps."""
        if wanted.is_contiguous():
            return self.clone(node, torch.contiguous_format)
        if is_last(wanted):
            return self.clone(node, torch.channels_last)
        strides = [hint_of(stride) for stride in wanted.stride()]
        order = sorted(range(len(strides)), key=lambda d: -strides[d])
        back = [order.index(d) for d in range(wanted.dim())]
        rows = call_like(node, aten.permute.default, node, order)
        dense = self.clone(rows, torch.contiguous_format)
        return call_like(node, aten.permute.default, dense, back)

    def clone(self, node: fx.Node, form: torch.memory_format) -> fx.Node:
        """Insert a copy of a value in a memory format."""
        made = call_like(node, aten.clone.default, node, memory_format=form)
        self.converted.append(made)
        return made


def _behind(node: fx.Node) -> fx.Node:
    """Return the insertion point after a node; after all placeholders if it is one."""
    place = node.next
    while place.op == "placeholder":
        place = place.next
    return place


def _changed(before: Any, found: Any) -> Any:
    """Return the new traced value, with the old one of each tensor whose strides are equivalent.

    So strides of axes with one element are the old ones, too: a gradient leaves with them.
    """
    if isinstance(found, tuple | list):
        each = [_changed(x, y) for x, y in zip(before, found, strict=True)]
        return each if isinstance(found, list) else tuple(each)
    if isinstance(found, torch.Tensor) and has_strides(before, found):
        return before
    return found
