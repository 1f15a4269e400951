"""Convolutions by Winograd's minimal filtering: 3 x 3 kernels of stride 1 with 4/9 of the products.

Two by two results of a channel depend on four by four pixels. Small constant matrices transform the
pixels and the results, and between them 16 products of matrices take the place of 36 (Lavin and
Gray, *Fast Algorithms for Convolutional Neural Networks*, 2015, F(2x2, 3x3))::

    U[a, b, c, o]        = sum(k, l: G[a, k] * G[b, l] * weight[o, c, k, l])
    V[a, b, n, c, i, j]  = sum(k, l: B[a, k] * B[b, l] * x[n, c, 2*i + k - p, 2*j + l - p])
    M[a, b, n, o, i, j]  = sum(c: U[a, b, c, o] * V[a, b, n, c, i, j])
    y[n, o, h, w]        = sum(a, b: A[h%2, a] * A[w%2, b] * M[a, b, n, o, h//2, w//2]) + bias[o]

where x is 0 outside, and p is the padding. ``fusec::winograd_weight`` is U, its columns in panels;
``fusec::winograd`` is y, as one definition. Its kernel transforms the pixels of some tiles,
multiplies and transforms back, in a core's cache (``ir/transformed.py``).
``fx_passes/winograd.py`` puts both into graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from fusec.frontend.call import AtenCall, Indices, read
from fusec.frontend.ops.literals import element_of
from fusec.frontend.ops.registry import defines, eager_kernel, lowers
from fusec.frontend.value import Value, positions
from fusec.ir.dtype import F32
from fusec.ir.expr import Expr, Reduce, both, in_range
from fusec.ir.index import Axis, Index, index
from fusec.ir.monoid import SUM

Table: TypeAlias = tuple[tuple[float, ...], ...]

OF_WEIGHTS: Table = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
"""G: a kernel's three places to four terms."""
OF_PIXELS: Table = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
"""B: four neighbouring pixels to four terms."""
OF_SUMS: Table = ((1, 1, 1, 0), (0, 1, -1, -1))
"""A: four terms to two results."""
TERMS, SIDE = len(OF_PIXELS), len(OF_SUMS)


# -- eager kernels ---------------------------------------------------------------------------------


def _fake(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Sequence[int]
) -> torch.Tensor:
    extents = (n + 2 * p - 2 for n, p in zip(image.shape[2:], padding, strict=True))
    made = image.new_empty((image.shape[0], weight.shape[2] * weight.shape[4], *extents))
    return made.contiguous(memory_format=torch.channels_last)


@eager_kernel(
    "winograd_weight(Tensor weight, int panel) -> Tensor",
    lambda w, panel: w.new_empty((TERMS, TERMS, w.shape[0] // panel, w.shape[1], panel)),
)
def winograd_weight(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """Return a weight [o, c, 3, 3], transformed, as [a, b, o // panel, c, o % panel]."""
    outputs, inputs, *kernel = weight.shape
    line = torch.tensor(OF_WEIGHTS, dtype=torch.float64)
    table = torch.kron(line, line)  # [a and b, k and l]
    made = weight.double().reshape(-1, math.prod(kernel)) @ table.t()
    cut = made.to(weight.dtype).view(outputs // panel, panel, inputs, TERMS, TERMS)
    return cut.permute(3, 4, 0, 2, 1).contiguous()


@eager_kernel("winograd(Tensor image, Tensor weight, Tensor? bias, int[] padding) -> Tensor", _fake)
def winograd(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Sequence[int]
) -> torch.Tensor:
    """Return the convolution of images [n, c, h, w] with the weight that was transformed."""
    back = torch.linalg.pinv(torch.tensor(OF_WEIGHTS, dtype=torch.float64))
    plain = torch.einsum("ka,lb,abpcq->pqckl", back, back, weight.double()).flatten(0, 1)
    made = torch.nn.functional.conv2d(image, plain.to(image.dtype), bias, padding=tuple(padding))
    return made.contiguous(memory_format=torch.channels_last)


# -- index notation --------------------------------------------------------------------------------


def _transformed(table: Table, row: Index, axis: Axis, term: Expr) -> Expr:
    """Return ``sum(axis: table[row, axis] * term)``."""
    numbers = [number for line in table for number in line]
    entry = element_of(numbers, row * len(table[0]) + index(axis), F32)
    return Reduce(SUM, (axis,), entry * term)


@defines(torch.ops.fusec.winograd_weight.default)
def transformed_weight(call: AtenCall, at: Indices, weight: Value, panel: int) -> Expr:
    """Return a transformed weight, its columns in panels."""
    a, b, group, c, place = at
    down, across = (Axis(name, weight.shape[2]) for name in "kl")
    value = read(weight, (group * panel + place, c, *positions((down, across))), F32)
    return _transformed(OF_WEIGHTS, a, down, _transformed(OF_WEIGHTS, b, across, value))


@lowers(torch.ops.fusec.winograd.default)
def filtered(
    call: AtenCall, image: Value, weight: Value, bias: Value | None, padding: Sequence[int]
) -> Value:
    """Emit a convolution with a transformed weight."""
    panel = weight.shape[4].const

    def body(at: Indices) -> Expr:
        n, o, h, w = at
        a, b, down, along = (Axis(name, index(TERMS)) for name in "abkl")
        c = Axis("c", image.shape[1])
        place = [
            position // SIDE * SIDE + index(step) - pad
            for position, step, pad in zip((h, w), (down, along), padding, strict=True)
        ]
        inside: Expr | None = None
        for position, extent in zip(place, image.shape[2:], strict=True):
            inside = both(inside, in_range(position, 0, extent))
        pixel = image.at((n, index(c), *place), inside)
        line = _transformed(OF_PIXELS, index(b), along, pixel)
        pixels = _transformed(OF_PIXELS, index(a), down, line)
        factor = weight.at((index(a), index(b), o // panel, index(c), o % panel))
        product = Reduce(SUM, (c,), factor * pixels)
        across = _transformed(OF_SUMS, w % SIDE, b, product)
        total = _transformed(OF_SUMS, h % SIDE, a, across)
        return total if bias is None else total + read(bias, (o,), F32)

    return call.define(body)
