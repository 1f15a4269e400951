"""Lower convolutions to index notation: sums over channels and the elements of a window.

A library's convolution is faster, so this is used where none may be called, in programs for C
(``--native``), and on CPUs for convolutions that sum few channels: depthwise ones along one axis,
as of sound or of a state space model, and their gradients, and those that
``fx_passes/short_convolutions.py`` has laid out. The windows are those of pooling. A depthwise
convolution has a group for each channel; a transposed one sums over the windows that contain an
element.

Worked example, ``conv2d(x, w, b, stride=2, padding=1)`` with a kernel of 3 x 3::

    y[n, o, h, w] = sum(c, k, l: x[n, c, 2*h + k - 1, 2*w + l - 1] * weight[o, c, k, l]) + b[o]

where x is 0 outside.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusec.errors import Unsupported
from fusec.frontend.call import AtenCall, Body, Indices, read_exact
from fusec.frontend.ops.domain import Domain
from fusec.frontend.ops.pooling import affine, over_places, over_windows_by_place, pooled_axes
from fusec.frontend.ops.registry import aten, lowers
from fusec.frontend.value import ZERO, Value, positions
from fusec.ir.dtype import compute_type
from fusec.ir.expr import Expr, loads
from fusec.ir.index import Axis, Index, IntoIndex, index
from fusec.ir.monoid import SUM


@lowers(aten.convolution.default)
def convolution(
    call: AtenCall, x: Value, weight: Value, bias: Value | None, *settings: Any
) -> Value:
    stride, padding, dilation, transposed, _, groups = settings
    if not (call.lines.alone or (not transposed and _is_own(call, x, weight, stride, groups))):
        raise Unsupported(LIBRARY)
    numbers = (stride, padding, dilation)
    return call.define(_sums(call, x, weight, bias, numbers, transposed, groups))


LIBRARY = "convolution: runs in the library"
MOST_CHANNELS, MOST_PLACES = 3, 7
"""Channels that a result of a short convolution sums at most, those of a picture, and the places of
its window along an axis."""


def _is_own(
    call: AtenCall, x: Value, weight: Value, stride: Sequence[int], groups: IntoIndex
) -> bool:
    """Return True for sums that kernels compute in less time than the library, on a CPU.

    For channels of their own along one axis a kernel takes 0.2 to 0.7 of oneDNN's time, gradients
    0.1 to 0.85 (f32, 3 to 31 places, one thread, AVX-512, alternated, 2026-11-26), unless elements
    that gradients sum lie apart in memory. Where channels lie side by side, as a product of
    matrices makes them, it is 0.2 to 0.7, and 1.0 for 16 x 64 x 64 (4 to 31 places, one thread,
    AVX2, CPU time in turn beside other work, 2026-11-28). Along two axes, the weight has its
    channels side by side, which ``frontend/fx_passes/short_convolutions.py`` sees to where a kernel
    is faster.
    """
    made, read, *window = weight.shape
    if len(window) == 2:
        several = call.is_cpu and made is not index(1) and call.out.strides[1] is index(1)
        return several and _is_short(read, window) and _is_dense(weight, 0)
    single = x.shape[1] == made == index(groups) and read == index(1)
    return call.is_cpu and single and [*stride] == [1]


def _is_short(read: Index, window: Sequence[Index]) -> bool:
    few = read.is_constant and read.const <= MOST_CHANNELS
    return few and all(n.is_constant and n.const <= MOST_PLACES for n in window)


def _is_dense(x: Value, dimension: int) -> bool:
    """Return True if neighbours along a dimension are neighbours in all memory that is read."""
    axis = x.axes[dimension]
    steps = (
        index(at * stride).coefficient(axis)
        for load in loads(x.exprs)
        for at, stride in zip(load.indices, load.buffer.strides, strict=True)
        if axis in at.axes
    )
    return all(step is index(1) for step in steps)


def _sums(
    call: AtenCall,
    x: Value,
    weight: Value,
    bias: Value | None,
    numbers: tuple[Sequence[int], ...],
    transposed: bool,
    groups: IntoIndex,
) -> Body:
    """Return a convolution, the call's first result, as a function of indices.

    Args:
        numbers: stride, padding and dilation.
    """
    kind = compute_type(call.out.dtype)
    rank = len(weight.shape) - 2
    if not kind.is_float:
        raise Unsupported(f"a convolution of {call.out.dtype}")
    ends = (call.out.shape, x.shape) if transposed else (x.shape, call.out.shape)
    windows = affine(pooled_axes(rank, *ends), (_kernel(weight), *numbers))
    around = over_windows_by_place if transposed else over_places
    # The input and the output channels of a group.
    read, made = weight.shape[not transposed], weight.shape[transposed]
    if transposed:
        read = read // groups
    else:
        made = made // groups

    def body(at: Indices) -> Expr:
        image, channel, *_ = at
        points = around(windows, at)
        own = Axis("c", read)
        (c,) = positions((own,))
        group = ZERO if index(groups) is index(1) else channel // made
        place = (image, group * read + c, *points.where[2:])
        over = Domain((own, *points.axes), place, points.number, points.inside)
        where = (place[1], channel - group * made) if transposed else (channel, c)
        factor = read_exact(weight, (*where, *positions(points.axes)), kind)
        term = over.exact(x, kind) * factor
        total = replace(over, inside=None).reduce(SUM, term)  # outside, x is read as 0
        return total if bias is None else total + read_exact(bias, (channel,), kind)

    return body


def _kernel(weight: Value) -> tuple[int, ...]:
    if not all(extent.is_constant for extent in weight.shape[2:]):
        raise Unsupported("a window of any size")
    return tuple(extent.const for extent in weight.shape[2:])


@lowers(aten.convolution_backward.default)
def convolution_backward(
    call: AtenCall, grad: Value, x: Value, weight: Value, _: Any, *settings: Any
) -> tuple[Value | None, ...]:
    """Emit the wanted gradients of the image, the weight and the bias.

    That of the image is the transposed convolution; that of the weight sums over images and places.
    """
    stride, padding, dilation, transposed, _, groups, wanted = settings
    one = not transposed and len(weight.shape) == 3 and _is_own(call, x, weight, stride, groups)
    if not (one and all(_is_dense(v, -1) for v in (x, grad))):
        raise Unsupported(LIBRARY)
    numbers = (stride, padding, dilation)
    (window,) = affine(pooled_axes(1, x.shape, grad.shape), (_kernel(weight), *numbers))

    def of_image(at: Indices) -> Expr:
        return _sums(call, grad, weight, None, numbers, True, groups)(at)

    def of_weight(at: Indices) -> Expr:
        channel, _, k = at
        image, place = Axis("n", x.shape[0]), Axis("t", grad.shape[2])
        n, t = positions((image, place))
        read, inside = window.place(t, k)
        over = Domain((image, place), (n, channel, read), ZERO, inside)
        kind = compute_type(weight.dtype)
        term = over.exact(x, kind) * read_exact(grad, (n, channel, t), kind)
        return replace(over, inside=None).reduce(SUM, term)

    def of_bias(at: Indices) -> Expr:
        image, place = Axis("n", x.shape[0]), Axis("t", grad.shape[2])
        over = Domain((image, place), (*positions((image,)), *at, *positions((place,))), ZERO)
        return over.total(grad, compute_type(grad.dtype))

    results = itertools.count()
    bodies = zip((of_image, of_weight, of_bias), wanted, strict=True)
    return tuple(call.define(body, next(results)) if asked else None for body, asked in bodies)
