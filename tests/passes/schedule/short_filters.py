"""A transformed product written by hand: filters of three places along a line, F(2, 3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Const, Expr, IndexValue, Op, Reduce, Select, in_range
from fusec.ir.graph import Def, FlatKernel
from fusec.ir.index import Axis, Index, index
from fusec.ir.monoid import SUM
from fusec.passes.kernel.coalesce import coalesce
from tests.ir.graphs import axes, buffer, graph, load
from tests.passes.pipelines import kernel_of

OF_PIXELS = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
OF_SUMS = ((1, 1, 1, 0), (0, 1, -1, -1))
OF_WEIGHTS = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


def entry(table: Sequence[Sequence[float]], row: Index, column: Index) -> Expr:
    numbers = [number for line in table for number in line]
    at, made = IndexValue(row * len(table[0]) + column), Const(numbers[-1], F32)
    for position in reversed(range(len(numbers) - 1)):
        below = Op("lt", (at, IndexValue(index(position + 1))))
        made = Select(below, Const(numbers[position], F32), made)
    return made


def weighted(table: Sequence[Sequence[float]], row: Index, axis: Axis, term: Expr) -> Expr:
    return Reduce(SUM, (axis,), Op("mul", (entry(table, row, index(axis)), term)))


def filtered(
    lines: int, places: int, channels: int, outputs: int, panel: int = 16
) -> tuple[FlatKernel, tuple[Buffer, Buffer, Buffer, Buffer]]:
    """y[n, w, o] = relu(sum(c, k: x[n, w + k - 1, c] * weight[o, c, k]) + r[n, w, o]), and x, u,
    r and y.
    """
    x, y = buffer("x", lines, places, channels), buffer("y", lines, places, outputs)
    r = buffer("r", lines, places, outputs)
    u = buffer("u", 4, outputs // panel, channels, panel)
    n, w, o = axes("n w o", lines, places, outputs)
    a, k, c = axes("a k c", 4, 4, channels)
    place = index(w) // 2 * 2 + k - 1
    pixels = weighted(
        OF_PIXELS, index(a), k, load(x, n, place, c, guard=in_range(place, 0, places))
    )
    weights = load(u, a, index(o) // panel, c, index(o) % panel)
    product = Reduce(SUM, (c,), Op("mul", (weights, pixels)))
    value = Op("add", (weighted(OF_SUMS, index(w) % 2, a, product), load(r, n, w, o)))
    value = Op("maximum", (value, Const(0.0, F32)))
    return coalesce(kernel_of(graph((x, u, r), (Def(y, (n, w, o), value),), y))), (x, u, r, y)


def transformed(weight: np.ndarray, panel: int = 16) -> np.ndarray:
    """Return weights [o, c, 3] as u[a, o // panel, c, o % panel]."""
    outputs, channels, _ = weight.shape
    made = np.einsum("ak,ock->aoc", OF_WEIGHTS, weight)
    return made.reshape(4, outputs // panel, panel, channels).transpose(0, 1, 3, 2)


def convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    return sum(padded[:, k : k + x.shape[1]] @ weight[:, :, k].T for k in range(3))
