"""Decide which convolutions of an FX graph run channels-last.

Convolutions whose images are joined by operations on images are a *component*: in it one format
flows (``channels_last.py``), so it is decided for all of them together. Channels-last saves the
gains of the convolutions, each of which is a choice (``ir/choice.py``), and costs the conversions:
of inputs, results, saved tensors and gradients, and of images before and after a reshape that mixes
channels with positions, such as the groups of a GroupNorm. The conversions are counted, not
estimated, in a copy of the graph. Images stay contiguous unless gains exceed costs clearly
(``RaceTuning.gain``).

The judge sees the convolutions with the largest gains by rule, up to ``RaceTuning.gains`` of their
sum, so the convolutions that are timed do not depend on how long that takes. The others gain in
proportion.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fusec.frontend.fx_passes.channels_last import (
    IMAGES,
    conversions,
    flow,
    images_of,
    is_image,
    is_last,
)
from fusec.frontend.fx_passes.fx_nodes import aten, count_bytes, decide, fakes_of
from fusec.frontend.origin import op_name
from fusec.ir.choice import Choice, Decided, Judge
from fusec.ir.decision import Decision
from fusec.ir.expr import reach
from fusec.ir.machine import Machine

CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels-last"

_CERTAIN_US = 1e9


def choose_formats(
    gm: fx.GraphModule, machine: Machine, judge: Judge, *, eager_draws: bool
) -> None:
    """Make the images of convolutions channels-last where that saves time, in place.

    Args:
        judge: decides what each convolution gains.
        eager_draws: random numbers are eager's, whose order is that of memory.
    """
    convolutions = [node for node in gm.graph.nodes if _may_convert(node)]
    if not convolutions:
        return
    groups = _components(gm.graph, convolutions)
    chosen = []
    for members in groups:
        images = [node for node in members if node.target in IMAGES]
        convert = partial(conversions, gm.graph, images, eager_draws=eager_draws)
        if _decide(images, machine, judge, convert):
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
    joined: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and _has_images(node):
            for source in _sources(node):
                joined[node].append(source)
                joined[source].append(node)
    found: list[list[fx.Node]] = []
    for node in convolutions:
        if not any(node in members for members in found):
            found.append(sorted(reach((node,), joined.__getitem__)))
    return found


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the images that a node reads; a convolution's weights are none."""
    if node.target in IMAGES:
        return list(images_of(node))
    return [source for source in node.all_input_nodes if _has_images(source)]


_REORDERS = (aten.view.default, aten.reshape.default, aten.permute.default)
"""Views whose axes are not those of the image."""


def _has_images(node: fx.Node) -> bool:
    """Return True for images, or several results with some; the gradient of a weight is none."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    if source is not None and source.target is aten.convolution_backward.default and node.args[1]:
        return False
    images = any(map(is_image, fakes_of(node.meta.get("val"))))
    return images and node.target not in _REORDERS


# -- what it saves ---------------------------------------------------------------------------------


def _decide(
    images: list[fx.Node], machine: Machine, judge: Judge, convert: Callable[[], list[Tensor]]
) -> bool:
    """Return True if a component is to be channels-last; each convolution knows why.

    Args:
        images: the calls of the component that would run channels-last.
        convert: returns what would be converted then.
    """
    convolutions = [
        node
        for node in images
        if _may_convert(node) and not all(is_last(i.meta["val"]) for i in images_of(node))
    ]
    if not convolutions:
        return False
    gains = _gains(convolutions, machine, judge)
    gained_us = sum(map(_gained_us, gains.values()))
    tuning = machine.races
    least_us = tuning.saved_share * sum(gain.reference_us for gain in gains.values())
    costs = f"; all {len(gains)} that share images gain {gained_us:.0f} us"
    taken = gained_us > least_us
    if taken:
        converted = convert()
        moved = sum(map(count_bytes, converted))
        cost_us = 2 * moved / machine.bytes_per_us + machine.launch_us * len(converted)
        taken = gained_us > max(tuning.gain * cost_us, cost_us + least_us)
        costs += f", and conversions of {moved} bytes in {len(converted)} places cost {cost_us:.0f}"
    for node, gain in gains.items():
        reason, saved_us = gain.reason + costs, _gained_us(gain)
        decide(node, Decision(node.name, CHANNELS_LAST, taken, reason, saved_us, CONTIGUOUS))
    return taken


def _gains(convolutions: list[fx.Node], machine: Machine, judge: Judge) -> dict[fx.Node, Decided]:
    """Return the format chosen for each convolution alone: a judge decides those that gain most."""
    ruled = {node: gain_by_rule(node, machine) for node in convolutions}
    gains: dict[fx.Node, Decided] = {}
    expected, left = 0.0, machine.races.gains * sum(map(_gained_us, ruled.values()))
    for node in sorted(ruled, key=lambda node: -_gained_us(ruled[node])):
        if gains and expected >= left:
            break
        gains[node] = judge(format_choice(node, ruled[node]))
        expected += _gained_us(ruled[node])
    if all(gain.pinned or gain.saved_us == ruled[node].saved_us for node, gain in gains.items()):
        return {**ruled, **gains}  # nothing was measured from which the others could follow
    rate = sum(map(_gained_us, gains.values())) / expected if expected else 0.0
    for node, gain in ruled.items():
        if node not in gains:
            reason = f"{rate:.2f} times as much as {gain.reason}"
            gains[node] = replace(gain, saved_us=rate * _gained_us(gain), reason=reason)
    return gains


def format_choice(convolution: fx.Node, ruled: Decided) -> Choice:
    """Return the choice between the memory formats of a convolution's images."""
    describe = partial(describe_convolution, convolution)
    candidates = CONTIGUOUS, CHANNELS_LAST
    return Choice("convolution", describe, convolution, candidates, lambda: ruled)


def describe_convolution(convolution: fx.Node) -> str:
    """Return the arguments on which a convolution's time depends as one line."""

    def described(value: Any) -> str:
        if not isinstance(value, fx.Node):
            return str(value).replace(" ", "")
        tensor = value.meta["val"]
        shape = ",".join(str(extent) for extent in tensor.shape)
        return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]"

    arguments = " ".join(map(described, convolution.args))
    return f"convolution {op_name(convolution.target)} {arguments}"


def _gained_us(decided: Decided) -> float:
    """Return the microseconds that channels-last images save; pinned, more than any conversion."""
    if decided.pinned:
        return _CERTAIN_US if decided.candidate == CHANNELS_LAST else -_CERTAIN_US
    return decided.saved_us or 0.0


def gain_by_rule(convolution: fx.Node, machine: Machine) -> Decided:
    """Return what a convolution gains where nothing is measured.

    oneDNN computes in a format of its own if images are contiguous, and converts images and results
    at each call. A 1 x 1 convolution, a product over channels, needs no conversion. Measured
    2026-11, batches of 4, AVX-512, f32, one thread: within a factor of two for depthwise and dense
    kernels of 3 to 7.
    """
    weight: Any = convolution.args[len(images_of(convolution))]
    if all(extent == 1 for extent in weight.meta["val"].shape[2:]):
        return Decided(CONTIGUOUS, "by rule: a 1 x 1 kernel is as fast in both formats", 0.0)
    results = convolution.meta["val"]
    made = results[0] if isinstance(results, tuple | list) else results
    read = (v for image in images_of(convolution) for v in fakes_of(image.meta["val"]))
    images = [*filter(is_image, read), *([] if made is None else [made])]
    moved = sum(map(count_bytes, images))
    reason = "by rule: the library converts contiguous images"
    return Decided(CHANNELS_LAST, reason, 2 * moved / machine.bytes_per_us)
