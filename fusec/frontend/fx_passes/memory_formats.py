"""Decide which convolutions of an FX graph run channels-last.

Convolutions whose images are joined by operations on images are a *component*: in it one format
flows (``channels_last.py``), so it is decided for all of them together. Channels-last saves what
each convolution gains (by a race on this machine, or by rule), and costs what is converted: inputs,
results, saved tensors and gradients, and images before and after a reshape that mixes channels with
places, as the groups of a GroupNorm do. What is converted is no estimate: the images flow in a copy
of the graph. Images stay as eager has them unless the gains are clear of the costs (``CLEAR``).

Which convolutions are timed does not depend on how long that takes: those of which the rule expects
most, ``TIMED`` of all that it expects. The others gain in proportion.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from fusec.frontend.fx_passes.channels_last import (
    IMAGES,
    conversions,
    flow,
    images_of,
    is_image,
    is_last,
)
from fusec.frontend.fx_passes.fx_nodes import count_bytes, fakes_of
from fusec.ir.decision import Decision

aten = torch.ops.aten

DECISION = "format"
"""Key of a node's ``meta`` with what was decided about its component."""

TIMED = 0.75
"""Share of the expected gains whose convolutions are timed."""
CLEAR = 1.5
"""How many times the conversions the gains must be: a kernel that reads or writes across the order
of memory may take several times what its bytes say (GroupNorm of 32 x 32 images: 3.3, 2026-11)."""
LEAST_SHARE = 0.03
"""Share of what the timed convolutions take that is to be saved."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What one convolution gains by images that are channels-last.

    Attributes:
        us: microseconds saved; negative where it loses.
        reason: how that is known.
        of_us: what it takes with contiguous images; 0 where nobody knows.
    """

    us: float
    reason: str
    of_us: float = 0.0


GainJudge: TypeAlias = Callable[[fx.Node], Gain]


class MachineRates(Protocol):
    """How fast the machine is: see ``passes/machine.py``."""

    @property
    def bytes_per_us(self) -> float: ...

    @property
    def launch_us(self) -> float: ...


def choose_formats(
    gm: fx.GraphModule, rates: MachineRates, judge: GainJudge | None, *, eager_draws: bool
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
        images = [node for node in members if node.target in IMAGES]
        if _decide(
            images, rates, judge, partial(conversions, gm.graph, images, eager_draws=eager_draws)
        ):
            chosen += images
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


def _decide(
    images: list[fx.Node],
    rates: MachineRates,
    judge: GainJudge | None,
    convert: Callable[[], list[torch.Tensor]],
) -> bool:
    """Return True if a component is to be channels-last; each convolution knows why.

    Args:
        images: the calls of the component that would run channels-last.
        convert: returns what would be converted then.
    """
    convolutions = [node for node in images if _may_convert(node) and not _is_last_already(node)]
    if not convolutions:
        return False
    gains = _gains(convolutions, rates, judge)
    gained_us = sum(gain.us for gain in gains.values())
    least_us = LEAST_SHARE * sum(gain.of_us for gain in gains.values())
    costs = f"; all {len(gains)} that share images gain {gained_us:.0f} us"
    taken = gained_us > least_us
    if taken:
        converted = convert()
        moved = sum(map(count_bytes, converted))
        cost_us = 2 * moved / rates.bytes_per_us + rates.launch_us * len(converted)
        taken = gained_us > max(CLEAR * cost_us, cost_us + least_us)
        costs += f", and conversions of {moved} bytes in {len(converted)} places cost {cost_us:.0f}"
    for node, gain in gains.items():
        node.meta[DECISION] = Decision(
            node.name, "channels-last", taken, gain.reason + costs, gain.us, "contiguous"
        )
    return taken


def _gains(
    convolutions: list[fx.Node], rates: MachineRates, judge: GainJudge | None
) -> dict[fx.Node, Gain]:
    """Return what each convolution gains: those that matter most are judged."""
    ruled = {node: gain_by_rule(node, rates) for node in convolutions}
    if judge is None:
        return ruled
    gains: dict[fx.Node, Gain] = {}
    expected, left = 0.0, TIMED * sum(gain.us for gain in ruled.values())
    for node in sorted(ruled, key=lambda node: -ruled[node].us):
        if gains and expected >= left:
            break
        gains[node] = judge(node)
        expected += ruled[node].us
    rate = sum(gain.us for gain in gains.values()) / expected if expected else 0.0
    for node, gain in ruled.items():
        if node not in gains:
            gains[node] = Gain(rate * gain.us, f"{rate:.2f} times as much as {gain.reason}")
    return gains


def _is_last_already(convolution: fx.Node) -> bool:
    return all(is_last(image.meta["val"]) for image in images_of(convolution))


def gain_by_rule(convolution: fx.Node, rates: MachineRates) -> Gain:
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


def _bytes(node: fx.Node) -> int:
    return sum(map(count_bytes, filter(is_image, fakes_of(node.meta["val"]))))
