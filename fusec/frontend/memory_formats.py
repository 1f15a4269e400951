"""Decide which convolutions of an FX graph run channels-last.

Convolutions whose images are joined by operations on images are a *component*: in it one format
flows (``channels_last.py``), so it is decided for all of them together. Channels-last saves what
each convolution gains (by a race on this machine, or by rule), and costs a conversion of each image
at the component's border: inputs, results, and reshapes that mix channels with places.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from fusec.frontend.channels_last import IMAGES, flow, images_of, is_image, is_last
from fusec.frontend.fx_nodes import count_bytes, fakes_of, hint_of
from fusec.ir.decision import Decision

aten = torch.ops.aten

DECISION = "format"
"""Key of a node's ``meta`` with what was decided about its component."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What one convolution gains by images that are channels-last.

    Attributes:
        us: microseconds saved; negative where it loses.
        reason: how that is known.
    """

    us: float
    reason: str


Judge: TypeAlias = Callable[[fx.Node], Gain]


class Rates(Protocol):
    """How fast the machine is: see ``passes/machine.py``."""

    @property
    def bytes_per_us(self) -> float: ...

    @property
    def launch_us(self) -> float: ...


def choose_formats(
    gm: fx.GraphModule, rates: Rates, judge: Judge | None, *, eager_draws: bool
) -> None:
    """Let the images of convolutions be channels-last where that saves time, in place.

    Args:
        judge: says what a convolution gains; None: the rule does.
        eager_draws: random numbers are those of eager, whose order is that of memory.
    """
    convolutions = [node for node in gm.graph.nodes if _may_convert(node)]
    if not convolutions:
        return
    groups = _components(gm.graph, convolutions)
    chosen = []
    for members in groups:
        if _decide(members, rates, judge):
            chosen += [node for node in members if node.target in IMAGES]
    if chosen:
        flow(gm, chosen, eager_draws=eager_draws)


def _may_convert(node: fx.Node) -> bool:
    """Return True for convolutions of floating images on a CPU; the gradient of a bias is none."""
    if node.op != "call_function" or node.target not in IMAGES or not _has_images(node):
        return False
    values = [image.meta["val"] for image in images_of(node)]
    return all(is_image(v) and v.device.type == "cpu" and v.dtype in _TYPES for v in values)


_TYPES = (torch.float32, torch.bfloat16, torch.float16)


# -- components ------------------------------------------------------------------------------------


def _components(graph: fx.Graph, convolutions: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes that are joined by images, for each set of them with convolutions."""
    parent: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while parent.setdefault(node, node) is not node:
            parent[node] = node = parent[parent[node]]
        return node

    for node in graph.nodes:
        if node.op == "call_function" and _has_images(node):
            for source in _sources(node):
                parent[find(source)] = find(node)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in parent:
            members.setdefault(find(node), []).append(node)
    return [members[root] for root in dict.fromkeys(map(find, convolutions))]


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the images that a node reads; a convolution's weights are none."""
    if node.target in IMAGES:
        return list(images_of(node))
    return [source for source in node.all_input_nodes if _has_images(source)]


_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_REORDERS = (*_RESHAPES, aten.permute.default, aten.transpose.int, aten.t.default)
"""Views whose axes are not those of the image."""


def _has_images(node: fx.Node) -> bool:
    if node.target in _REORDERS or _is_weight_gradient(node):
        return False
    return any(map(is_image, fakes_of(node.meta.get("val"))))


def _is_weight_gradient(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    source: Any = node.args[0]
    return source.target is aten.convolution_backward.default and node.args[1] in (1, 2)


# -- what it saves ---------------------------------------------------------------------------------


def _decide(members: list[fx.Node], rates: Rates, judge: Judge | None) -> bool:
    """Return True if a component is to be channels-last; each convolution knows why."""
    convolutions = [node for node in members if _may_convert(node) and not _is_last_already(node)]
    if not convolutions:
        return False
    judge = judge or (lambda node: gain_by_rule(node, rates))
    order = {node: gain_by_rule(node, rates).us for node in convolutions}
    gains = {node: judge(node) for node in sorted(order, key=order.__getitem__, reverse=True)}
    border = _border(members)
    converted = sum(map(_bytes, border))
    cost_us = 2 * converted / rates.bytes_per_us + rates.launch_us * len(border)
    saved_us = sum(gain.us for gain in gains.values()) - cost_us
    for node, gain in gains.items():
        reason = (
            f"{gain.reason}; all {len(gains)} that share images: {saved_us:.0f} us "
            f"with {converted} bytes converted at their border"
        )
        node.meta[DECISION] = Decision(
            node.name, "channels-last", saved_us > 0, reason, gain.us, "contiguous"
        )
    return saved_us > 0


def _is_last_already(convolution: fx.Node) -> bool:
    return all(is_last(image.meta["val"]) for image in images_of(convolution))


def gain_by_rule(convolution: fx.Node, rates: Rates) -> Gain:
    """Return what is gained where nothing is measured.

    oneDNN computes in a format of its own if images are contiguous, and converts them, and what it
    returns, at each call. A product of channels (1 x 1) needs none. Measured 2026-11, batches of 4
    with AVX-512, f32, one thread: within a factor of two for depthwise and dense kernels of 3 to 7.
    """
    weight: Any = convolution.args[len(images_of(convolution))]
    if all(extent == 1 for extent in weight.meta["val"].shape[2:]):
        return Gain(0.0, "by rule: a product of channels is as fast in both formats")
    results = convolution.meta["val"]
    made = results[0] if isinstance(results, tuple | list) else results
    moved = sum(map(_bytes, images_of(convolution))) + (0 if made is None else count_bytes(made))
    return Gain(2 * moved / rates.bytes_per_us, "by rule: the library converts contiguous images")


def _border(members: list[fx.Node]) -> list[fx.Node]:
    """Return the images that are converted where a component is channels-last."""
    return [node for node in members if _arrives(node) or any(map(_leaves(node), node.users))]


def _arrives(node: fx.Node) -> bool:
    made_here = node.op == "call_function" and _has_images(node)
    return not made_here and not is_last(node.meta["val"])


def _leaves(node: fx.Node) -> Callable[[fx.Node], bool]:
    """Return what is True for users that may need the image contiguous."""
    value = node.meta["val"]
    if not is_image(value) or is_last(value):
        return lambda user: False
    kept = [hint_of(n) for n in value.shape[:2]]  # height and width may become one axis

    def needs(user: fx.Node) -> bool:
        if user.target in _RESHAPES:
            return [hint_of(n) for n in user.meta["val"].shape[:2]] != kept
        return user.op == "output"

    return needs


def _bytes(node: fx.Node) -> int:
    return sum(map(count_bytes, filter(is_image, fakes_of(node.meta["val"]))))
