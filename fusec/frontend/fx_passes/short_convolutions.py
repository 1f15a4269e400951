"""Lay out the weights of convolutions that sum few channels for kernels of fusec's own.

Runs on graphs of ATen, inference or joint, behind ``memory_formats``. A result of a depthwise
convolution sums one channel, one of a picture's first convolution three. In channels-last images
the channels of a result's place lie side by side, in a weight ``[o, c, h, w]`` they lie whole
windows apart. So the weight is copied in the order ``[c, h, w, o]``, under ``freeze`` once::

    y = convolution(x, w, b, ...)    becomes    f = permute(clone(permute(w)))
                                                y = convolution(x, f, b, ...)

Shapes and values are the same. What lies so is lowered to index notation
(``frontend/ops/convolutions.py``), which reads a picture in its own order: a conversion is skipped.
"""

from __future__ import annotations

import torch
from torch import fx

from fusec.frontend.fx_passes.channels_last import is_last
from fusec.frontend.fx_passes.fx_nodes import aten, call_like, decide, tensor_of
from fusec.frontend.ops.convolutions import MOST_CHANNELS
from fusec.ir.decision import Decision
from fusec.ir.machine import Machine

_REASON = "by rule: a call takes longer than to sum few channels"


def lay_out_short(gm: fx.GraphModule, machine: Machine) -> None:
    """Lay out the weights of convolutions that kernels compute faster, in place."""
    nodes = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    found = [node for node in nodes if _gains(node, machine)]
    for node in found:
        weight = node.args[1]
        with gm.graph.inserting_before(node):
            turned = call_like(node, aten.permute.default, weight, [1, 2, 3, 0])
            copied = call_like(
                node, aten.clone.default, turned, memory_format=torch.contiguous_format
            )
            node.update_arg(1, call_like(node, aten.permute.default, copied, [3, 0, 1, 2]))
        decide(node, Decision(node.name, "kernel", True, _REASON, None, "the library"))
    if found:
        gm.recompile()


def is_laid_out(weight: torch.Tensor) -> bool:
    """Return True for the weight of a short convolution in the order [c, h, w, o]."""
    short = weight.dim() == 4 and weight.shape[1] <= MOST_CHANNELS
    return bool(short and weight.shape[0] != 1 and weight.stride(0) == 1)


def _gains(node: fx.Node, machine: Machine) -> bool:
    """Return True for short convolutions in f32, with channels-last results, in two dimensions.

    Channels fill vectors, the window is small, and neighbouring results can be computed together
    (``passes/kernel/unroll_windows.py``).
    """
    image, filters, made = tensor_of(node.args[0]), tensor_of(node.args[1]), node.meta["val"]
    stride, _, dilation, transposed, _, groups = node.args[3:9]
    if transposed or image is None or filters is None or len(stride) != 2:  # type: ignore[arg-type]
        return False
    channels, read, *window = filters.shape
    if not all(isinstance(n, int) for n in (*made.shape[1:], *filters.shape)):
        return False
    plain = made.dtype is torch.float32 and all(n == 1 for n in dilation)  # type: ignore[union-attr]
    tuning = machine.loops
    together = any(side % count == 0 for side in made.shape[2:] for count in tuning.neighbours)
    fills = channels >= machine.vector and min(window) > 1 and max(window) <= tuning.places
    if not (plain and together and fills and is_last(made)):
        return False
    if groups == channels == image.shape[1] and read == 1:  # depthwise
        return is_last(image)
    narrow = channels <= tuning.picture_vectors * machine.vector
    return bool(groups == 1 and read <= MOST_CHANNELS and max(window) <= 3 and narrow)
