"""Flat kernels for the tests of schedules, and their plans as short texts."""

from __future__ import annotations

from fusec.ir.dtype import BF16, F32, DType
from fusec.ir.expr import Cast, Expr, Op, Reduce
from fusec.ir.graph import Def, Kernel
from fusec.ir.index import Axis, IntoIndex, index
from fusec.ir.monoid import MAX, SUM, Monoid
from fusec.ir.scalar import ROUND
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.online_softmax import online_softmax
from fusec.passes.schedule.plan import Plan, print_plan
from tests.ir.graphs import axes, buffer, graph, load, total
from tests.passes.pipelines import kernel_of, unified


def bindings(plan: Plan) -> str:
    """Return how each axis runs, as printed: ``m=grid  c=lanes(64)``."""
    return print_plan("k", plan).split("    ")[1]


def f32_of(expr: Expr) -> Expr:
    return expr if expr.dtype is F32 else Cast(expr, F32)


def to(expr: Expr, dtype: DType) -> Expr:
    return expr if expr.dtype is dtype else Cast(expr, dtype)


def pointwise(*shape: IntoIndex, dtype: DType = F32, row: DType | None = None) -> Kernel:
    """y[m, ..., c] = x[m, ..., c] * w[c]: rows that no axis can be merged with."""
    x, y = buffer("x", *shape, dtype=dtype), buffer("y", *shape, dtype=dtype)
    own = axes(" ".join("mno"[: len(shape) - 1] + "c"), *shape)
    w = buffer("w", shape[-1], dtype=row or dtype)
    value = Op("mul", (f32_of(load(x, *own)), f32_of(load(w, own[-1]))))
    return kernel_of(graph((x, w), (Def(y, own, to(value, dtype)),), y))


def line(extent: IntoIndex, dtype: DType = F32, name: str = "neg") -> Kernel:
    """y[c] = -x[c], or another function of it"""
    x, y = buffer("x", extent, dtype=dtype), buffer("y", extent, dtype=dtype)
    (c,) = axes("c", extent)
    value = Op(name, (f32_of(load(x, c)),))
    return kernel_of(graph((x,), (Def(y, (c,), to(value, dtype)),), y))


def transposed(rows: int, columns: int, dtype: DType = F32) -> Kernel:
    """y[m, c] = -x[c, m]"""
    x, y = buffer("x", columns, rows, dtype=dtype), buffer("y", rows, columns, dtype=dtype)
    m, c = axes("m c", rows, columns)
    value = Op("neg", (f32_of(load(x, c, m)),))
    return kernel_of(graph((x,), (Def(y, (m, c), to(value, dtype)),), y))


def rows(count: IntoIndex, width: IntoIndex, dtype: DType = F32, monoid: Monoid = SUM) -> Kernel:
    """y[m, c] = x[m, c] - reduce(k: x[m, k])"""
    x, y = buffer("x", count, width, dtype=dtype), buffer("y", count, width, dtype=dtype)
    m, c, k = axes("m c k", count, width, width)
    row = Reduce(monoid, (k,), f32_of(load(x, m, k)))
    value = Op("sub", (f32_of(load(x, m, c)), row))
    return kernel_of(graph((x,), (Def(y, (m, c), to(value, dtype)),), y))


def split_rows(count: int, parts: int, width: int, tensors: int = 1) -> Kernel:
    """y[m] = sum(p: max(c: x[m, p*width + c] * ...)): rows of some tensors in parts."""
    xs, y = [buffer(f"x{n}", count, parts * width) for n in range(tensors)], buffer("y", count)
    m, p, c = axes("m p c", count, parts, width)
    value, *others = (load(x, m, index(p) * width + c) for x in xs)
    for other in others:
        value = Op("mul", (value, other))
    inner = Reduce(MAX, (c,), value)
    return kernel_of(graph(tuple(xs), (Def(y, (m,), Reduce(SUM, (p,), inner)),), y))


def columns(count: IntoIndex, width: IntoIndex, monoid: Monoid = SUM) -> Kernel:
    """w[c] = reduce(m: x[m, c])"""
    x, w = buffer("x", count, width), buffer("w", width)
    m, c = axes("m c", count, width)
    return kernel_of(graph((x,), (Def(w, (c,), Reduce(monoid, (m,), load(x, m, c))),), w))


def rows_and_columns(
    parts: int, height: int, width: int, *, limit: int | None = None, monoid: Monoid = MAX
) -> Kernel:
    """y = x - max by rows, and partial column sums of y: what a norm's backward does."""
    many = parts * height
    x = buffer("x", many if limit is None else limit, width)
    y, w = buffer("y", *(n.const for n in x.shape)), buffer("w", parts, width)
    m, c, k = axes("m c k", x.shape[0], width, width)
    first = Def(y, (m, c), Op("sub", (load(x, m, c), total(monoid, k, load(x, m, k)))))
    p, c = axes("p c", parts, width)
    end = None if limit is None else index(limit) - index(p) * height
    i = Axis("i", index(height), limit=end)
    at = index(p) * height + i
    second = Def(w, (p, c), Reduce(SUM, (i,), Op("mul", (load(x, at, c), load(y, at, c)))))
    return kernel_of(graph((x,), (first, second), y, w))


def products(m: int, n: int, k: int, *, count: int = 1, dtype: DType = BF16) -> Kernel:
    """y0[m, n] = sum(k: x[m, k] * w0[k, n]), and so on for each of ``count`` weights."""
    x = buffer("x", m, k, dtype=dtype)
    inputs, defs = [x], []
    for number in range(count):
        w, y = buffer(f"w{number}", k, n, dtype=dtype), buffer(f"y{number}", m, n, dtype=dtype)
        i, j, r = axes("m n k", m, n, k)
        body = Op("mul", (f32_of(load(x, i, r)), f32_of(load(w, r, j))))
        inputs.append(w)
        defs.append(Def(y, (i, j), to(Reduce(SUM, (r,), body), dtype)))
    return kernel_of(graph(tuple(inputs), tuple(defs), *(d.buffer for d in defs)))


def attention(heads: int, queries: int, keys: int, depth: int, dtype: DType = BF16) -> Kernel:
    """y[b, m, d] = sum(n: softmax(n: sum(c: q[b, m, c] * k[b, n, c])) * v[b, n, d])."""
    q, k, v, y = (
        buffer(name, heads, extent, depth, dtype=dtype)
        for name, extent in (("q", queries), ("k", keys), ("v", keys), ("y", queries))
    )
    top, whole = buffer("top", heads, queries), buffer("whole", heads, queries)

    def score(b: Axis, m: Axis, n: Axis) -> Expr:
        (c,) = axes("c", depth)
        return total(SUM, c, Op("mul", (f32_of(load(q, b, m, c)), f32_of(load(k, b, n, c)))))

    def weight(b: Axis, m: Axis, n: Axis) -> Expr:
        return Op("exp", (Op("sub", (score(b, m, n), load(top, b, m))),))

    own = [axes("b m n", heads, queries, keys) for _ in range(3)]
    (b, m, n), (d,) = own[2], axes("d", depth)
    share: Expr = Op("div", (weight(b, m, n), load(whole, b, m)))
    share = Op(ROUND[dtype], (share,)) if dtype in ROUND else share
    blend = total(SUM, n, Op("mul", (share, f32_of(load(v, b, n, d)))))
    lines = (
        Def(top, own[0][:2], total(MAX, own[0][2], score(*own[0]))),
        Def(whole, own[1][:2], total(SUM, own[1][2], weight(*own[1]))),
        Def(y, (b, m, d), to(blend, dtype)),
    )
    return coalesce(online_softmax(unified(graph((q, k, v), lines, y))))
