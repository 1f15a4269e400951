"""Replace 3 x 3 convolutions of channels-last images by Winograd's minimal filtering.

Runs on graphs of ATen, inference or joint, behind ``memory_formats``. The gradient of the images is
a convolution with the weight turned round. A weight is transformed by an operation of its own,
which ``freeze`` computes once::

    y = convolution(x, w, b, ...)    becomes    u = fusec.winograd_weight(w, panel)
                                                y = fusec.winograd(x, u, b, padding)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusec.frontend.fx_passes.channels_last import is_last
from fusec.frontend.fx_passes.fx_nodes import (
    DECISIONS,
    aten,
    call_like,
    call_of_value,
    count_elements,
    decide,
    replace,
    tensor_of,
)
from fusec.frontend.fx_passes.weights import fixed_values
from fusec.frontend.ops import winograd  # noqa: F401  defines the operations
from fusec.ir.decision import Decision
from fusec.ir.machine import Machine

ops = torch.ops.fusec

_REASON = "by rule: 3 x 3 kernels of stride 1 take 16 multiplications instead of 36"


def filter_by_tiles(gm: fx.GraphModule, machine: Machine, *, freezes: bool) -> None:
    """Replace convolutions, and gradients of images, by minimal filtering that is faster, in place.

    Args:
        freezes: what follows from weights alone is computed once.
    """
    known = fixed_values(gm) if freezes else {}
    found = 0
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        x, weight, bias, *settings = node.args
        if _gains(x, weight, node.meta["val"], settings, machine, fixed=weight in known):
            with gm.graph.inserting_before(node):
                made = _filtered(node, x, weight, bias, settings[1], machine.vector)
            replace(node, made)
            found += 1
    for node in gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        found += _filter_gradient(node, machine)
    if found:
        gm.recompile()


def _filter_gradient(node: fx.Node, machine: Machine) -> bool:
    """Compute the gradient of a convolution's images by filtering, if it gains; tell whether."""
    gradient, x, weight, sizes, *settings = node.args[:10]
    padding: Any = settings[1]
    wanted: Any = node.args[10]
    like = node.meta["val"]
    if not wanted[0] or not _gains(gradient, weight, like[0], settings, machine, fixed=False):
        return False
    with node.graph.inserting_before(node):
        turned = call_like(node, aten.flip.default, weight, [2, 3])
        turned = call_like(node, aten.permute.default, turned, [1, 0, 2, 3])
        around = [2 - n for n in padding]
        made = _filtered(node, gradient, turned, None, around, machine.vector)
        others = (gradient, x, weight, sizes, *settings, [False, *wanted[1:]])
        rest = call_of_value(node, (None, *like[1:]), node.target, *others)
    for part in [part for part in node.users if part.args[1] == 0]:
        replace(part, made)
    replace(node, rest)
    return True


def _filtered(node: fx.Node, x: Any, weight: Any, bias: Any, padding: Any, panel: int) -> fx.Node:
    """Insert the filtering of images, in the place of a call."""
    made = call_like(node, ops.winograd_weight.default, weight, panel)
    image = call_like(node, ops.winograd.default, x, made, bias, list(padding))
    for one in (made, image):  # what `explain` calls them
        one.meta["original_aten"] = node.target
    image.meta[DECISIONS] = node.meta.get(DECISIONS, ())
    decide(image, Decision(image.name, "winograd", True, _REASON, None, "the library"))
    return image


def _gains(
    x: Any, weight: Any, made: torch.Tensor, settings: Any, machine: Machine, *, fixed: bool
) -> bool:
    """Return True for a 3 x 3 convolution whose saved products take longer than its transforms.

    It has stride 1, its images are channels-last, in f32, and channels fill vectors.

    Args:
        settings: the arguments of ``aten.convolution`` after the bias.
        fixed: its weight is transformed once, not by each call.
    """
    stride, padding, dilation, transposed, _, groups = settings
    image, filters = tensor_of(x), tensor_of(weight)
    if transposed or groups != 1 or image is None or filters is None or len(stride) != 2:
        return False
    if made.dtype is not torch.float32 or not (is_last(image) and is_last(made)):
        return False
    whole = all(isinstance(n, int) for n in (*made.shape[1:], *filters.shape))
    plain = all(n == 1 for n in (*stride, *dilation)) and all(n in (0, 1, 2) for n in padding)
    if not (whole and plain and tuple(filters.shape[2:]) == (3, 3)):
        return False
    if any(n % machine.vector for n in filters.shape[:2]):
        return False
    tuning, places = machine.fusion, count_elements(made) // made.shape[1]
    least = tuning.filtered_places if fixed else tuning.filtered_places_each
    return min(made.shape[2:]) >= tuning.filtered_side and places >= least
