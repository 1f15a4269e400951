"""Structures written by hand, for the tests of the IR."""

from __future__ import annotations

from fusec.ir.dtype import BF16, F32, I64, DType
from fusec.ir.expr import Buffer, Cast, Const, Expr, IndexValue, Load, Op, Reduce, Select
from fusec.ir.extern import Product
from fusec.ir.graph import Argument, Def, Extern, Graph, View
from fusec.ir.index import Axis, IntoIndex, Runtime, Size, index
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.ir.strides import contiguous_strides
from fusec.tools.interpreter.expression import Env, eval_tile, expand, sort_axes
from fusec.tools.interpreter.scalar import Array


def buffer(name: str, *shape: IntoIndex, dtype: DType = F32) -> Buffer:
    """Return a row-major buffer."""
    extents = tuple(index(extent) for extent in shape)
    return Buffer(name, extents, contiguous_strides(extents), dtype)


def axes(names: str, *extents: IntoIndex) -> tuple[Axis, ...]:
    """Return one axis for each name (separated by blanks) and extent."""
    return tuple(Axis(n, index(e)) for n, e in zip(names.split(), extents, strict=True))


def load(source: Buffer, *indices: IntoIndex, guard: Expr | None = None) -> Load:
    return Load(source, tuple(index(i) for i in indices), guard)


def f32(value: float) -> Const:
    return Const(value, F32)


def total(monoid: Monoid, axis: Axis, body: Expr) -> Reduce:
    return Reduce(monoid, (axis,), body)


def whole(buffer: Buffer) -> View:
    """Return the view of all of a buffer."""
    return View(buffer, buffer.shape, buffer.strides, index(0))


def mm(name: str, left: View, right: View, made: Buffer) -> Extern:
    """Return the library's product of two matrices."""
    known = Product("aten.addmm.default", "aten.addmm_.default")
    return Extern(name, "aten.mm.default", (left, right), (), (made,), "a product", effect=known)


def graph(
    inputs: tuple[Buffer | Size | None, ...], nodes: tuple[Def | Extern, ...], *outputs: Buffer
) -> Graph:
    views: tuple[Argument, ...] = tuple(whole(b) for b in outputs)
    return Graph("example", inputs, nodes, views)


def layer_norm(rows: IntoIndex, columns: int, dtype: DType = F32) -> Graph:
    """mu, xc = x - mu, rstd and y = xc * rstd * w + b, one definition each."""
    x, y = buffer("x", rows, columns, dtype=dtype), buffer("y", rows, columns, dtype=dtype)
    w, b = buffer("w", columns), buffer("b", columns)
    mu, rstd = buffer("mu", rows), buffer("rstd", rows)

    def value(m: Axis, c: Axis) -> Expr:
        loaded = load(x, m, c)
        return loaded if dtype is F32 else Cast(loaded, F32)

    m, c = axes("m c", rows, columns)
    mean = Def(mu, (m,), Op("div", (total(SUM, c, value(m, c)), f32(columns))))
    m, c = axes("m c", rows, columns)
    centred = Op("sub", (value(m, c), load(mu, m)))
    variance = Op("div", (total(SUM, c, Op("mul", (centred, centred))), f32(columns)))
    scale = Def(rstd, (m,), Op("rsqrt", (Op("add", (variance, f32(1e-5))),)))
    m, c = axes("m c", rows, columns)
    normal = Op("mul", (Op("sub", (value(m, c), load(mu, m))), load(rstd, m)))
    result: Expr = Op("add", (Op("mul", (normal, load(w, c))), load(b, c)))
    final = Def(y, (m, c), result if dtype is F32 else Cast(result, dtype))
    sizes = tuple(atom for mono, _ in index(rows).terms for atom in mono if isinstance(atom, Size))
    return graph((*sizes, x, w, b), (mean, scale, final), y, rstd)


def softmax(rows: int, columns: int) -> Graph:
    """One definition with two reductions over axes of their own."""
    x, y = buffer("x", rows, columns), buffer("y", rows, columns)
    m, c, j, k = axes("m c j k", rows, columns, columns, columns)
    top = total(MAX, j, load(x, m, j))
    below = total(SUM, k, Op("exp", (Op("sub", (load(x, m, k), top)),)))
    above = Op("exp", (Op("sub", (load(x, m, c), top)),))
    return graph((x,), (Def(y, (m, c), Op("div", (above, below))),), y)


def matmul(m_extent: IntoIndex, n_extent: int, k_extent: int) -> Graph:
    """A product of two bf16 matrices, accumulated in f32."""
    a = buffer("a", m_extent, k_extent, dtype=BF16)
    b = buffer("b", k_extent, n_extent, dtype=BF16)
    out = buffer("out", m_extent, n_extent, dtype=BF16)
    m, n, k = axes("m n k", m_extent, n_extent, k_extent)
    factors = Op("mul", (Cast(load(a, m, k), F32), Cast(load(b, k, n), F32)))
    return graph((a, b), (Def(out, (m, n), Cast(total(SUM, k, factors), BF16)),), out)


def position(value: IntoIndex, dtype: DType = I64) -> IndexValue:
    return IndexValue(index(value), dtype)


def below(value: IntoIndex, bound: IntoIndex) -> Expr:
    """Return the condition ``value < bound`` over indices."""
    return Op("lt", (position(value), position(bound)))


def cat(first: int, second: int) -> Graph:
    """The concatenation of two vectors, as a choice between guarded loads."""
    x, y = buffer("x", first), buffer("y", second)
    out = buffer("out", first + second)
    (i,) = axes("i", first + second)
    inside = below(i, first)
    left = load(x, i, guard=inside)
    right = load(y, index(i) - first, guard=Op("not", (inside,)))
    return graph((x, y), (Def(out, (i,), Select(inside, left, right)),), out)


def gather(rows: int, columns: int, picked: int) -> Graph:
    """Rows of a table by a vector of positions."""
    table = buffer("table", rows, columns)
    ids, out = buffer("ids", picked, dtype=I64), buffer("out", picked, columns)
    i, c = axes("i c", picked, columns)
    row = Runtime(load(ids, i), index(rows))
    return graph((table, ids), (Def(out, (i, c), load(table, index(row), c)),), out)


def ragged_sum(columns: int, tile: int) -> Graph:
    """The sum of a row in two steps, its axis cut into tiles of which the last is ragged."""
    x, part, out = buffer("x", columns), buffer("part", -(-columns // tile)), buffer("out", 1)
    (o,) = axes("o", -(-columns // tile))
    i = Axis("i", index(tile), limit=index(columns) - index(o) * tile)
    inner = total(SUM, i, Op("exp", (load(x, index(o) * tile + i),)))
    (z,), (p,) = axes("z", 1), axes("p", -(-columns // tile))
    return graph((x,), (Def(part, (o,), inner), Def(out, (z,), total(SUM, p, load(part, p)))), out)


def eval_expr(expr: Expr, env: Env) -> Array:
    """Return the value of ``expr`` over all of its free axes, sorted by serial."""
    tile = eval_tile(expr, env)
    free = (axis for axis in expr.axes if axis not in env.points)
    return expand(tile, sort_axes((*free, *tile.axes)), env)
