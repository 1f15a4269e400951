"""Programs written by hand, for the printers' tests.

`Builder` appends statements as the lowering would: one operation a `Let`, names from a hint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusec.codegen.triton.form import FORM, Form, by_pointers
from fusec.ir.dtype import BF16, F16, F32, I64, DType
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    Var,
)
from fusec.ir.index import Axis, Index, IntoIndex, Runtime, Size, index
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.ir.program import Carry, For, Let, Program, Put, Statement, Update
from fusec.ir.strides import contiguous_strides

_serial = itertools.count(1)


def form_of(program: Program, *, descriptors: bool = True) -> Form:
    """Run the stages of ``FORM`` on a program, without verifying or dumping between them.

    Args:
        descriptors: whether tiles may be copied by descriptors; else pointers are used.
    """
    form: Any = program if descriptors else by_pointers(program)
    for stage in FORM:
        form = stage.run(form, None)
    assert isinstance(form, Form)
    return form


def buffer(name: str, dtype: DType, *shape: IntoIndex) -> Buffer:
    """Return a row-major buffer."""
    extents = tuple(index(extent) for extent in shape)
    return Buffer(name, extents, contiguous_strides(extents), dtype)


class Builder:
    """A program in the making: `grid` and `lanes` axes are given, statements are appended."""

    def __init__(
        self, name: str, grid: tuple[Axis, ...] = (), lanes: tuple[Axis, ...] = ()
    ) -> None:
        self.name = name
        self.grid = grid
        self.lanes = lanes
        self.body: list[Statement] = []
        self.reads: dict[Buffer, None] = {}
        self.writes: dict[Buffer, None] = {}

    def _var(self, hint: str, dtype: DType, axes: frozenset[Axis]) -> Var:
        number = next(_serial)
        return Var(f"{hint}{number}", dtype, axes & frozenset(self.lanes))

    def let(self, value: Expr, hint: str = "t") -> Var:
        var = self._var(hint, value.dtype, value.axes)
        self.body.append(Let(var, value))
        return var

    def op(self, name: str, *args: Expr) -> Var:
        return self.let(Op(name, args))

    def cast(self, value: Expr, dtype: DType) -> Var:
        return self.let(Cast(value, dtype))

    def select(self, condition: Expr, then: Expr, other: Expr) -> Var:
        return self.let(Select(condition, then, other))

    def position(self, value: IntoIndex, dtype: DType = I64) -> Var:
        return self.let(IndexValue(index(value), dtype), "i")

    def load(self, source: Buffer, offset: IntoIndex, guard: Var | None = None) -> Var:
        self.reads[source] = None
        return self.let(Load(source.flat(), (index(offset),), guard), source.name)

    def load_f32(self, source: Buffer, offset: IntoIndex, guard: Var | None = None) -> Var:
        return self.cast(self.load(source, offset, guard), F32)

    def reduce(self, monoid: Monoid, over: tuple[Axis, ...], body: Expr) -> Var:
        return self.let(Reduce(monoid, over, body), monoid.name)

    def put(
        self, target: Buffer, offset: IntoIndex, value: Var | Const, guard: Var | None = None
    ) -> None:
        self.writes[target] = None
        self.body.append(Put(target.flat(), index(offset), value, guard))

    def carry(self, initial: Const, *lanes: Axis) -> Var:
        var = self._var("acc", initial.dtype, frozenset(lanes))
        self.body.append(Carry(var, initial))
        return var

    def update(self, carry: Var, value: Expr) -> None:
        self.body.append(Update(carry, value))

    @contextmanager
    def loop(self, axis: Axis, *stops: IntoIndex, start: IntoIndex = 0) -> Iterator[None]:
        outer, self.body = self.body, []
        yield
        inner, self.body = self.body, outer
        self.body.append(For(axis, index(start), tuple(map(index, stops)), tuple(inner)))

    def program(self, *sizes: Size, notation: tuple[str, ...] = ()) -> Program:
        return Program(
            self.name,
            tuple(self.reads),
            tuple(self.writes),
            sizes,
            self.grid,
            self.lanes,
            tuple(self.body),
            notation,
        )


def f32(value: float) -> Const:
    return Const(value, F32)


def tiled(name: str, extent: IntoIndex, tile: int) -> tuple[Axis, Axis, Index]:
    """Return the outer axis, the lane axis and the position of an axis cut into tiles."""
    outer = Axis(f"{name}o", (index(extent) + (tile - 1)) // index(tile))
    lane = Axis(f"{name}i", index(tile))
    return outer, lane, index(outer) * tile + lane


# -- kernels -------------------------------------------------------------------------------------


def relu_chain(dtype: DType, extent: IntoIndex, tile: int, *, masked: bool) -> Program:
    """y[i] = max(x[i], 0) * 0.5 + 1, flat; the extent may be a size."""
    outer, lane, i = tiled("i", extent, tile)
    b = Builder("relu_chain", (outer,), (lane,))
    x, y = buffer("x", dtype, extent), buffer("y", dtype, extent)
    guard = b.op("lt", b.position(i), b.position(extent)) if masked else None
    value = b.op("maximum", b.load_f32(x, i, guard), f32(0.0))
    value = b.op("add", b.op("mul", value, f32(0.5)), f32(1.0))
    b.put(y, i, b.cast(value, dtype), guard)
    return b.program(*(extent.terms[0][0] if isinstance(extent, Index) else ()))


def layer_norm(rows: IntoIndex, columns: int) -> Program:
    """xr = x + r;  y = (xr - mean(xr)) * rsqrt(var(xr) + eps) * w + b, bf16, a row in lanes."""
    m, c = Axis("m", index(rows)), Axis("c", index(columns))
    b = Builder("layer_norm", (m,), (c,))
    x, r = buffer("x", BF16, rows, columns), buffer("r", BF16, rows, columns)
    w, bias = buffer("w", BF16, columns), buffer("b", BF16, columns)
    here = index(m) * columns + c
    xr = b.op("add", b.load_f32(x, here), b.load_f32(r, here))
    b.put(buffer("xr", BF16, rows, columns), here, b.cast(xr, BF16))
    mean = b.op("div", b.reduce(SUM, (c,), xr), f32(columns))
    centred = b.op("sub", xr, mean)
    variance = b.op("div", b.reduce(SUM, (c,), b.op("mul", centred, centred)), f32(columns))
    scale = b.op("rsqrt", b.op("add", variance, f32(1e-5)))
    y = b.op("mul", b.op("mul", centred, scale), b.load_f32(w, c))
    y = b.op("add", y, b.load_f32(bias, c))
    b.put(buffer("y", BF16, rows, columns), here, b.cast(y, BF16))
    sizes = tuple(s for s in (rows,) if isinstance(s, Size))
    return b.program(*sizes, notation=("xr[m, c] = x[m, c] + r[m, c];  y = layer_norm(xr)",))


def softmax(rows: int, columns: int, lanes: int, rows_per_program: int) -> Program:
    """y[m, c] = exp(x - max) / sum(exp), f32, a ragged row in two-axis lanes."""
    mo, mi, m = tiled("m", rows, rows_per_program)
    c = Axis("c", index(lanes))
    b = Builder("softmax", (mo,), (mi, c))
    x, y = buffer("x", F32, rows, columns), buffer("y", F32, rows, columns)
    inside = b.op("lt", b.position(c), b.position(columns))
    here = m * columns + c
    value = b.load(x, here, inside)
    top = b.reduce(MAX, (c,), b.select(inside, value, f32(-float("inf"))))
    e = b.op("exp", b.op("sub", value, top))
    total = b.reduce(SUM, (c,), b.select(inside, e, f32(0.0)))
    b.put(y, here, b.op("div", e, total), inside)
    return b.program()


def looped_row_sum(rows: IntoIndex, columns: int, tile: int) -> Program:
    """y[m] = sum(c: x[m, c]): full tiles without a mask, then the ragged one."""
    m = Axis("m", index(rows))
    co, ci, c = tiled("c", columns, tile)
    b = Builder("row_sum", (m,), (ci,))
    x, y = buffer("x", F32, rows, columns), buffer("y", F32, rows)
    acc = b.carry(f32(0.0), ci)
    full = columns // tile
    with b.loop(co, full):
        b.update(acc, Op("add", (acc, b.load(x, index(m) * columns + c))))
    with b.loop(co, co.extent, start=full):
        inside = b.op("lt", b.position(c), b.position(columns))
        b.update(acc, Op("add", (acc, b.load(x, index(m) * columns + c, inside))))
    b.put(y, m, b.reduce(SUM, (ci,), acc))
    return b.program(*(s for s in (rows,) if isinstance(s, Size)))


def bias_tile(rows: int, columns: int, tile: tuple[int, int]) -> Program:
    """y[m, n] = x[n, m] + bias[n] in f16, a transposed read in two-axis tiles."""
    mo, mi, m = tiled("m", rows, tile[0])
    no, ni, n = tiled("n", columns, tile[1])
    b = Builder("bias_tile", (mo, no), (mi, ni))
    x, bias = buffer("x", F16, columns, rows), buffer("bias", F16, columns)
    value = b.op("add", b.load_f32(x, n * rows + m), b.load_f32(bias, n))
    b.put(buffer("y", F16, rows, columns), m * columns + n, b.cast(value, F16))
    return b.program()


def embedding(tokens: int, vocabulary: int, columns: int) -> Program:
    """y[t, c] = table[ids[t], c]."""
    t, c = Axis("t", index(tokens)), Axis("c", index(columns))
    b = Builder("embedding", (t,), (c,))
    ids, table = buffer("ids", I64, tokens), buffer("table", BF16, vocabulary, columns)
    row = index(Runtime(b.load(ids, t), index(vocabulary)))
    value = b.load(table, row * columns + c)
    b.put(buffer("y", BF16, tokens, columns), index(t) * columns + c, value)
    return b.program()
