"""Lower convolutions to index notation: sums over channels and the elements of a window.

A library's convolution is faster, so this is used only where none may be called: in programs for C
(``--native``). The windows are those of pooling. A depthwise convolution has a group for each
channel; a transposed one sums over the windows that contain an element.

Worked example, ``conv2d(x, w, b, stride=2, padding=1)`` with a kernel of 3 x 3::

    y[n, o, h, w] = sum(c, k, l: x[n, c, 2*h + k - 1, 2*w + l - 1] * weight[o, c, k, l]) + b[o]

where x is 0 outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Indices, read_exact
from fusec.frontend.ops.domain import Domain
from fusec.frontend.ops.pooling import Affine, affine, over_places, pooled_axes
from fusec.frontend.ops.registry import lowers
from fusec.frontend.value import ZERO, Value, positions
from fusec.ir.dtype import compute_type
from fusec.ir.expr import Expr, IndexValue, both, in_range, op
from fusec.ir.index import Axis, Index
from fusec.ir.monoid import SUM

aten = torch.ops.aten


@lowers(aten.convolution.default, alone=True)
def convolution(
    call: AtenCall,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    kind = compute_type(call.out.dtype)
    rank = len(weight.shape) - 2
    kernel = weight.shape[2:]
    if not kind.is_float or not all(extent.is_constant for extent in kernel):
        raise Unsupported("a convolution of no numbers, or with a window of any size")
    numbers = (tuple(extent.const for extent in kernel), stride, padding, dilation)
    windows = affine(pooled_axes(rank, x.shape, call.out.shape), numbers)
    # The input and the output channels of a group.
    read, made = weight.shape[not transposed], weight.shape[transposed]
    if transposed:
        read = read // groups
    else:
        made = made // groups

    def body(at: Indices) -> Expr:
        image, channel, *_ = at
        around = _around(windows, at) if transposed else over_places(windows, at)
        own = Axis("c", read)
        (c,) = positions((own,))
        group = channel // made if groups > 1 else ZERO
        place = (image, group * read + c, *around.where[2:])
        over = Domain((own, *around.axes), place, around.number, around.inside)
        where = (place[1], channel - group * made) if transposed else (channel, c)
        factor = read_exact(weight, (*where, *positions(around.axes)), kind)
        term = op("mul", over.exact(x, kind), factor)
        total = replace(over, inside=None).reduce(SUM, term)  # outside, x is read as 0
        return total if bias is None else op("add", total, read_exact(bias, (channel,), kind))

    return call.define(body)


def _around(windows: Sequence[Affine], at: Indices) -> Domain:
    """Return the windows that contain an element, one for each position of it in the kernel.

    A position counts only if the window that it leads to starts at a multiple of the stride.
    """
    axes = tuple(Axis(f"k{d}", window.places) for d, window in enumerate(windows))
    where: list[Index] = list(at[:2])
    guard: Expr | None = None
    for k, window, position in zip(positions(axes), windows, at[2:], strict=True):
        reach = position + window.padding - k * window.dilation
        first = reach // window.stride
        divides = op("eq", IndexValue(reach % window.stride), IndexValue(ZERO))
        guard = both(guard, divides if window.stride > 1 else None)
        guard = both(guard, in_range(first, 0, window.extent))
        where.append(first)
    return Domain(axes, tuple(where), ZERO, guard)
