"""Replace convolutions by matrix products where the kernel has one pixel and only mixes channels.

Runs on graphs of ATen, inference or joint. Where the channels of each pixel are laid out as the row
of a matrix, the product's operands are views, and all optimisations of products apply: libraries,
skinny products, epilogues, packing under ``freeze``. Images of one pixel, such as those of a
squeeze and excitation, have this layout in every memory format::

    y = convolution(x[n, c, 1, 1], w[o, c, 1, 1], b)      becomes
    y = unsqueeze(mm(squeeze(x), squeeze(w).t()) + b)

and so do their gradients. Those of sound ``[n, c, t]``, contiguous and in ``f32``, are products for
each image, ``bmm(w, x)``. Of channels-last images gradients become products (``_gains``), and in
``f32`` short convolutions (``_is_short``). What each takes of the library's time stands in
docs/decisions/pointwise-convolutions.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusec.frontend.fx_passes.channels_last import is_last
from fusec.frontend.fx_passes.fx_nodes import (
    aten,
    call_like,
    count_elements,
    extent_of,
    hint_of,
    replace,
    tensor_of,
)


def multiply_channels(gm: fx.GraphModule, most: int) -> None:
    """Replace convolutions of one-pixel images, short ones, and gradients, by products, in place.

    Args:
        most: multiply-adds of a short one.
    """
    nodes = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    found = [n for n in nodes if _is_product(n.args[1], *n.args[3:9]) and _is_short(n, most)]
    sounds = [n for n in nodes if _is_product(n.args[1], *n.args[3:9]) and _is_sound(n)]
    for multiply, chosen in ((_product, found), (_batch, sounds)):
        for node in chosen:
            with gm.graph.inserting_before(node):
                made = multiply(node)
            replace(node, made)
    nodes = gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    gradients = [n for n in nodes if _is_product(n.args[2], *n.args[4:10]) and _gains(n)]
    for node in gradients:
        with gm.graph.inserting_before(node):
            results = _gradients(node)
        replace(node, results)
    if found or sounds or gradients:
        gm.recompile()


def _is_short(node: fx.Node, most: int) -> bool:
    """Return True for an image of one pixel, or a channels-last one in f32 with few multiply-adds.

    A single channel lies alike in both memory formats, and may be traced in the other one.
    """
    image, made = node.args[0], node.meta["val"]
    x, steps = tensor_of(image), node.args[3]
    if _has_one_place(image):
        return True
    if made.dtype is not torch.float32 or any(n != 1 for n in steps):  # type: ignore[union-attr]
        return False
    single = any(value is None or value.shape[1] == 1 for value in (x, made))
    last = not single and is_last(x) and is_last(made)
    return last and count_elements(made) * hint_of(x.shape[1]) <= most  # type: ignore[union-attr]


def _is_sound(node: fx.Node) -> bool:
    """Return True for a contiguous image of one dimension in f32, of several places."""
    image, steps = node.args[0], node.args[3]
    x = tensor_of(image)
    if x is None or x.dim() != 3 or x.dtype is not torch.float32 or _has_one_place(image):
        return False
    return x.is_contiguous() and steps == [1]


def _gains(node: fx.Node) -> bool:
    """Return True for gradients that are no slower as products, whatever their widths.

    One library call shares work between both gradients: as a product on its own, the weight's took
    up to 1.15 of the library's time, the image's in ``bf16`` up to 1.5 (2048 to 512 channels).
    """
    image: Any = node.args[1]
    if _has_one_place(image):
        return True
    steps: Any = node.args[4]
    wanted: Any = node.args[10]
    last = all(is_last(tensor_of(one)) for one in node.args[:2])
    both = wanted[0] and (wanted[1] or image.meta["val"].dtype is torch.float32)
    return last and both and all(n == 1 for n in steps)


def _is_product(weight: Any, *settings: Any) -> bool:
    """Return True for an ungrouped convolution without padding, whose kernel has one pixel.

    Its strides do not matter for an image of one pixel.

    Args:
        settings: the arguments of ``aten.convolution`` after the bias.
    """
    _, padding, _, transposed, _, groups = settings
    if transposed or groups != 1 or any(n != 0 for n in padding):
        return False
    return _has_one_place(weight) and weight.meta["val"].dtype.is_floating_point


def _has_one_place(image: Any) -> bool:
    """Return True for a tensor [a, b, 1, ...]: one pixel for each of the first two indices."""
    value = tensor_of(image)
    if value is None or value.layout is not torch.strided:
        return False
    return all(isinstance(n, int) and n == 1 for n in value.shape[2:])


# -- products --------------------------------------------------------------------------------------


def _product(node: fx.Node) -> fx.Node:
    """Insert the product that computes a convolution's result, and return it."""
    x, weight, bias = node.args[:3]
    rows, columns = _rows(node, x), _turned(node, _rows(node, weight))
    made = call_like(node, aten.mm.default, rows, columns)
    if bias is not None:
        made = call_like(node, aten.add.Tensor, made, bias)
    return _image(node, made, node.meta["val"], x)


def _batch(node: fx.Node) -> fx.Node:
    """Insert the products that compute a convolution's results, one for each image [c, t]."""
    x, weight, bias = node.args[:3]
    matrix = call_like(node, aten.squeeze.dims, weight, [2])
    one = call_like(node, aten.unsqueeze.default, matrix, 0)
    each = call_like(node, aten.expand.default, one, [extent_of(x, 0), -1, -1])  # type: ignore[arg-type]
    made = call_like(node, aten.bmm.default, each, x)
    if bias is None:
        return made
    return call_like(node, aten.add.Tensor, made, call_like(node, aten.unsqueeze.default, bias, 1))


def _gradients(node: fx.Node) -> list[fx.Node | None]:
    """Insert the gradients of a convolution's image, weight and bias, as far as required."""
    gradient, x, weight = (_rows(node, arg) for arg in node.args[:3])
    wanted: Any = node.args[10]
    like: Any = node.meta["val"]
    made: list[fx.Node | None] = [None, None, None]
    if wanted[0]:
        product = call_like(node, aten.mm.default, gradient, weight)
        made[0] = _image(node, product, like[0], node.args[1])
    if wanted[1]:
        product = call_like(node, aten.mm.default, _turned(node, gradient), x)
        made[1] = _image(node, product, like[1], node.args[2])
    if wanted[2]:
        made[2] = call_like(node, aten.sum.dim_IntList, gradient, [0])
    return made


def _turned(node: fx.Node, matrix: fx.Node) -> fx.Node:
    return call_like(node, aten.permute.default, matrix, [1, 0])


# -- images as matrices ----------------------------------------------------------------------------


def _rows(node: fx.Node, image: Any) -> fx.Node:
    """Return an image [n, c, h, w] as a matrix [n*h*w, c]: a view.

    The image has one pixel, and any strides, or is channels-last.
    """
    value = image.meta["val"]
    if _has_one_place(image):
        return call_like(node, aten.squeeze.dims, image, list(range(2, value.dim())))
    last = call_like(node, aten.permute.default, image, [0, 2, 3, 1])
    return call_like(node, aten.view.default, last, [-1, value.shape[1]])


def _image(node: fx.Node, matrix: fx.Node, like: torch.Tensor, of: Any) -> fx.Node:
    """Return a matrix [n*h*w, c] as an image [n, c, h, w] with the strides of another value.

    Strides of axes with one element move no data, but they determine a tensor's memory format.

    Args:
        of: a node that has the extents of the image, except for its channels.
    """
    rank, channels, one = like.dim(), like.shape[1], _has_one_place(of)
    images = -1 if one else extent_of(of, 0)
    pixels = [1 if one else extent_of(of, k) for k in range(2, rank)]
    if one and (rank == 2 or like.stride(2) == 1):
        return call_like(node, aten.view.default, matrix, [images, channels, *pixels])
    form = call_like(node, aten.view.default, matrix, [images, *pixels, channels])
    return call_like(node, aten.permute.default, form, [0, rank - 1, *range(1, rank - 1)])
