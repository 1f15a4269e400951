"""The names that a pass of the user imports: they exist, a page says what each is, and they do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch

import fusec
from fusec import notation
from fusec.driver.user_passes import REGISTERED
from fusec.notation import (
    F32,
    MAX,
    SUM,
    Axis,
    Buffer,
    Cast,
    Const,
    Def,
    Expr,
    Graph,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    cast,
    index,
    op,
    rewrite,
    substitute_all,
    verify_graph,
    whole_view,
)

ROOT = Path(__file__).parents[1]


def row_norm() -> Graph:
    """Return a graph that divides rows by their sums, built by hand."""
    x = Buffer.row_major("x", (index(4), index(8)), F32)
    total = Buffer.row_major("total", (index(4),), F32)
    y = Buffer.row_major("y", x.shape, F32)
    m, c, n = Axis("m", index(4)), Axis("c", index(8)), Axis("n", index(4))
    k = Axis("k", index(8))
    rows = Def(total, (m,), Reduce(SUM, (c,), Load(x, (index(m), index(c)))))
    quotient = op("div", Load(x, (index(n), index(k))), Load(total, (index(n),)))
    return Graph("rows", (x,), (rows, Def(y, (n, k), quotient)), (whole_view(y),))


def test_the_page_names_each_of_them() -> None:
    page = (ROOT / "docs/passes.md").read_text(encoding="utf-8")
    table = page.partition("## What a pass reads and writes")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    assert named == set(notation.__all__)


def test_each_of_them_says_what_it_is() -> None:
    for name in notation.__all__:
        value = getattr(notation, name)
        assert not (inspect.isclass(value) or inspect.isfunction(value)) or inspect.getdoc(value)


def test_a_graph_is_built_by_hand_verified_and_printed() -> None:
    graph = row_norm()
    verify_graph(graph)
    assert str(graph) == (
        "graph rows(x: f32[4, 8])\n"
        "  total[m] = sum(c: x[m, c])    : f32[4]\n"
        "  y[n, k] = x[n, k] / total[n]    : f32[4, 8]\n"
        "  return y"
    )
    assert str(graph.nodes[1]) == "y[n, k] = x[n, k] / total[n]    : f32[4, 8]"


def test_the_worked_example_halves() -> None:
    def halve(node: Expr) -> Expr:
        match node:
            case Op(name="div", args=(x, Const(value=2.0))):
                return op("mul", x, Const(0.5, x.dtype))
        return node

    x = Load(Buffer.row_major("x", (), F32), ())
    (made,) = rewrite((op("div", x, Const(2.0, F32)),), halve)
    assert repr(made) == "x[] * 0.5"


def test_expressions_are_substituted_and_selected() -> None:
    graph = row_norm()
    (n, k), i = graph.defs[1].axes, Axis("i", index(4))
    (made,) = substitute_all((graph.defs[1].expr,), {n: index(i), k: index(i) + 2})
    positive = op("gt", made, Const(0.0, F32))
    chosen = Select(positive, made, cast(IndexValue(index(i)), F32))
    assert repr(chosen) == (
        "where((x[i, i + 2] / total[i]) > 0.0, x[i, i + 2] / total[i], f32((i):i64))"
    )
    assert isinstance(chosen.other, Cast)


def test_a_softmax_without_its_maximum_is_a_rewrite_of_one_node() -> None:
    """The user knows that scores are small: no maximum has to be taken from them."""

    def without_maximum(node: Expr) -> Expr:
        match node:
            case Reduce(monoid=monoid, dtype=dtype) if monoid is MAX:
                return Const(0.0, dtype)
        return node

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)

    fusec.register_pass("small_scores")(
        lambda graph: graph.map(lambda exprs: rewrite(exprs, without_maximum))
    )
    torch._dynamo.reset()
    options = {"strict": True, "passes": "small_scores", "verify": True}
    x = torch.randn(4, 300)
    try:
        made = torch.compile(softmax, backend="fusec", options=options)(x)
        torch.testing.assert_close(made, x.softmax(-1))
        kernels = fusec.kernels(softmax, x, options={"passes": "small_scores"})
        assert "max(" not in kernels[0].notation and "max(" in fusec.kernels(softmax, x)[0].notation
    finally:
        REGISTERED.pop("small_scores")
