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
from fusec.frontend.ops.arithmetic import select
from fusec.frontend.ops.registry import lowers
from fusec.frontend.value import Value, positions
from fusec.ir.dtype import F32
from fusec.ir.expr import Const, Expr, IndexValue, Reduce, both, in_range, op
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

_library = torch.library.Library("fusec", "FRAGMENT")
for _signature in (
    "winograd_weight(Tensor weight, int panel) -> Tensor",
    "winograd(Tensor image, Tensor weight, Tensor? bias, int[] padding) -> Tensor",
):
    _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))


# -- eager kernels ---------------------------------------------------------------------------------


def winograd_weight(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """Return a weight [o, c, 3, 3], transformed, as [a, b, o // panel, c, o % panel]."""
    outputs, inputs, *kernel = weight.shape
    line = torch.tensor(OF_WEIGHTS, dtype=torch.float64)
    table = torch.kron(line, line)  # [a and b, k and l]
    made = weight.double().reshape(-1, math.prod(kernel)) @ table.t()
    cut = made.to(weight.dtype).view(outputs // panel, panel, inputs, TERMS, TERMS)
    return cut.permute(3, 4, 0, 2, 1).contiguous()


def winograd(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Sequence[int]
) -> torch.Tensor:
    """Return the convolution of images [n, c, h, w] with a transformed weight, channels-last."""
    images, _, *extents = _made_shape(image, weight, padding)
    tiles = [-(-extent // SIDE) for extent in extents]
    sides = [SIDE * count + SIDE for count in tiles]
    places = [p for side, n, pad in zip(sides, image.shape[2:], padding, strict=True)
              for p in (pad, side - n - pad)]  # fmt: skip
    padded = torch.nn.functional.pad(image, (*places[2:], *places[:2]))
    pixels = padded.unfold(2, TERMS, SIDE).unfold(3, TERMS, SIDE)  # n c i j k l
    terms, sums = torch.tensor(OF_PIXELS), torch.tensor(OF_SUMS)
    terms, sums = terms.to(image.dtype), sums.to(image.dtype)
    products = torch.einsum("ak,bl,ncijkl,abpcq->abnpqij", terms, terms, pixels, weight)
    made = torch.einsum("ra,sb,abnpqij->npqirjs", sums, sums, products)
    whole = made.reshape(images, -1, SIDE * tiles[0], SIDE * tiles[1])
    cut = whole[:, :, : extents[0], : extents[1]]
    cut = cut if bias is None else cut + bias.view(-1, 1, 1)
    return cut.contiguous(memory_format=torch.channels_last)


def _made_shape(
    image: torch.Tensor, weight: torch.Tensor, padding: Sequence[int]
) -> tuple[int, ...]:
    extents = (n + 2 * p - 2 for n, p in zip(image.shape[2:], padding, strict=True))
    return (image.shape[0], weight.shape[2] * weight.shape[4], *extents)


def _fake_weight(weight: torch.Tensor, panel: int) -> torch.Tensor:
    outputs, inputs = weight.shape[:2]
    return weight.new_empty((TERMS, TERMS, outputs // panel, inputs, panel))


def _fake(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Sequence[int]
) -> torch.Tensor:
    made = image.new_empty(_made_shape(image, weight, padding))
    return made.contiguous(memory_format=torch.channels_last)


for _name, _kernel, _traced in (
    ("winograd_weight", winograd_weight, _fake_weight),
    ("winograd", winograd, _fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusec::{_name}", _traced, lib=_library)


# -- index notation --------------------------------------------------------------------------------


def _entry(table: Table, row: Index, column: Index) -> Expr:
    """Return an entry of a constant matrix as a function of its row and column."""
    numbers = [number for line in table for number in line]
    at = IndexValue(row * len(table[0]) + column)
    made: Expr = Const(numbers[-1], F32)
    for position in reversed(range(len(numbers) - 1)):
        if numbers[position] != numbers[position + 1] or not isinstance(made, Const):
            below = op("lt", at, IndexValue(index(position + 1)))
            made = select(below, Const(numbers[position], F32), made)
    return made


def _transformed(table: Table, row: Index, axis: Axis, term: Expr) -> Expr:
    """Return ``sum(axis: table[row, axis] * term)``."""
    return Reduce(SUM, (axis,), op("mul", _entry(table, row, index(axis)), term))


@lowers(torch.ops.fusec.winograd_weight.default)
def transformed_weight(call: AtenCall, weight: Value, panel: int) -> Value:
    """Emit a transformed weight, its columns in panels."""

    def body(at: Indices) -> Expr:
        a, b, group, c, place = at
        down, across = (Axis(name, weight.shape[2]) for name in "kl")
        value = read(weight, (group * panel + place, c, *positions((down, across))), F32)
        return _transformed(OF_WEIGHTS, a, down, _transformed(OF_WEIGHTS, b, across, value))

    return call.define(body)


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
        product = Reduce(SUM, (c,), op("mul", factor, pixels))
        across = _transformed(OF_SUMS, w % SIDE, b, product)
        total = _transformed(OF_SUMS, h % SIDE, a, across)
        return total if bias is None else op("add", total, read(bias, (o,), F32))

    return call.define(body)
