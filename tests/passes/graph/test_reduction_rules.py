"""Rules of reductions keep every value, at the ends of axes too."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import fusec
from fusec.ir.dtype import BOOL, F32, I64
from fusec.ir.expr import (
    Const,
    Op,
    Reduce,
    Select,
    postorder,
)
from fusec.ir.graph import Def
from fusec.ir.index import Axis, index
from fusec.ir.monoid import ALL, ANY, SUM, Monoid
from fusec.ir.serial import scan_of
from fusec.passes.graph.simplify import simplify
from fusec.tools.interpreter.graph import run_graph
from tests.ir.graphs import axes, below, buffer, f32, graph, load, position
from tests.ir.test_serial import until
from tests.passes.graph.test_simplify import out_of, simplified
from tests.passes.pipelines import check_same, numbers
from tests.support import check, values


def test_a_one_hot_sum_is_one_comparison_and_no_loop() -> None:
    x, t = buffer("x", 4), buffer("t", 4, dtype=I64)
    i, r = axes("i r", 4, 6)
    chosen = Select(Op("eq", (position(r), load(t, i))), load(x, i), f32(0))
    expr = Reduce(SUM, (r,), chosen)
    assert not any(isinstance(n, Reduce) for n in postorder((simplified(expr, i, x, t),)))
    before = out_of(expr, i, x, t)
    check_same(before, simplify(before), (np.array([5.0, 6, 7, 8]), np.array([0, 5, 6, -1])))


def test_a_one_hot_sum_multiplies_an_infinite_factor_by_the_zeros_too() -> None:
    x, t, b = buffer("x", 4), buffer("t", 4, dtype=I64), buffer("b", 4)
    i, r = axes("i r", 4, 6)
    chosen = Select(Op("eq", (position(r), load(t, i))), load(x, i), f32(0))
    expr = Reduce(SUM, (r,), chosen * load(b, i))
    assert not any(isinstance(n, Reduce) for n in postorder((simplified(expr, i, x, t, b),)))
    before = out_of(expr, i, x, t, b)
    inputs = [np.array([5.0, 6, 7, 8]), np.array([0, 5, 6, 2]), np.array([np.inf, 2, np.nan, 3])]
    (found,) = run_graph(simplify(before), inputs)
    np.testing.assert_array_equal(found, [np.nan, 12, np.nan, 24])


def test_a_one_hot_sum_of_a_part_of_an_axis_ends_where_the_part_ends() -> None:
    x, t = buffer("x", 4), buffer("t", 4, dtype=I64)
    (i,) = axes("i", 4)
    r = Axis("r", index(6), limit=index(i) + 1)
    chosen = Select(Op("eq", (position(r), load(t, i))), load(x, i), f32(0))
    before = out_of(Reduce(SUM, (r,), chosen), i, x, t)
    inputs = [np.array([5.0, 6, 7, 8]), np.array([0, 5, 2, 3])]
    for made in (before, simplify(before)):
        np.testing.assert_array_equal(run_graph(made, inputs)[0], [5, 0, 7, 8])


def test_a_sum_along_an_axis_that_the_body_lacks_is_a_product() -> None:
    x = buffer("x", 4)
    i, r = axes("i r", 4, 6)
    before = out_of(Reduce(SUM, (r,), load(x, i)), i, x)
    after = simplify(before)
    assert "sum" not in repr(after.nodes[0].expr)
    check_same(before, after, (np.array([1.0, -2, 3, 4]),))


@pytest.mark.parametrize("bound", [-np.inf, np.inf])
@pytest.mark.parametrize("monoid", [ANY, ALL])
def test_whether_a_row_is_at_an_extreme_is_asked_of_its_extreme(
    monoid: Monoid, bound: float
) -> None:
    x, out = buffer("x", 6, 3), buffer("out", 6, dtype=BOOL)
    i, r = axes("i r", 6, 3)
    equal = Op("eq", (load(x, i, r), f32(bound)))
    asked = Op("not", (equal,)) if monoid is ANY else equal
    before = graph((x,), (Def(out, (i,), Reduce(monoid, (r,), asked)),), out)
    after = simplify(before)
    (line,) = after.nodes
    assert isinstance(line, Def)
    kinds = [n.monoid.name for n in postorder((line.expr,)) if isinstance(n, Reduce)]
    assert kinds == ["max" if bound < 0 else "min"]
    rows = [[bound] * 3, [bound, 1, bound], [bound, np.nan, bound], [-bound] * 3, [0, 0, 0]]
    check_same(before, after, (np.array([*rows, [np.nan, bound, -bound]], np.float32),))


@pytest.mark.parametrize("asked", ["any equal", "all other", "number", "integer"])
def test_other_questions_of_a_row_stay(asked: str) -> None:
    x = buffer("x", 4, 3, dtype=I64 if asked == "integer" else F32)
    out = buffer("out", 4, dtype=BOOL)
    i, r = axes("i r", 4, 3)
    bound = Const(7, I64) if asked == "integer" else f32(1.0 if asked == "number" else -np.inf)
    equal = Op("eq", (load(x, i, r), bound))
    monoid, body = (ANY, equal) if asked == "any equal" else (ALL, equal)
    if asked == "all other":
        body = Op("not", (equal,))
    before = graph((x,), (Def(out, (i,), Reduce(monoid, (r,), body)),), out)
    (line,) = simplify(before).nodes
    assert isinstance(line, Def)
    kinds = [n.monoid for n in postorder((line.expr,)) if isinstance(n, Reduce)]
    assert kinds == [monoid]


@pytest.mark.parametrize(("ends", "apart"), [(15, True), (14, False), (1, False)])
def test_only_the_last_of_a_row_is_reduced_apart(ends: int, apart: bool) -> None:
    m, r = axes("m r", 4, 16)
    x, y, out = buffer("x", 4, 16), buffer("y", 4), buffer("out", 4)
    row = Select(below(r, ends), load(x, m, r), load(y, m))
    before = graph((x, y), (Def(out, (m,), Reduce(SUM, (r,), row)),), out)
    after = simplify(before)
    (line,) = after.defs
    assert isinstance(line.expr, Op) is apart
    check_same(before, after, (numbers(4, 16), numbers(4, seed=1)))


def test_the_last_key_of_a_cache_is_a_term_of_the_product() -> None:
    m, r = axes("m r", 4, 16)
    x, y, w, out = buffer("x", 4, 16), buffer("y", 4), buffer("w", 16), buffer("out", 4)
    row = Op("mul", (load(w, r), Select(below(r, 15), load(x, m, r), load(y, m))))
    after = simplify(graph((x, y, w), (Def(out, (m,), Reduce(SUM, (r,), row)),), out))
    assert isinstance(after.defs[0].expr, Reduce)


def test_a_scan_of_a_row_and_one_more_stays_a_scan() -> None:
    """Split, it would be a sum up to each point, which no loop over steps computes."""
    m, i, r = axes("m i r", 4, 16, 16)
    x, y, out = buffer("x", 4, 16), buffer("y", 4), buffer("out", 4, 16)
    row = Select(below(r, 15), load(x, m, r), load(y, m))
    total = Reduce(SUM, (r,), Select(until(r, i), row, f32(0)))
    after = simplify(graph((x, y), (Def(out, (m, i), total),), out))
    assert isinstance(after.defs[0].expr, Reduce) and scan_of(after.defs[0].expr) is not None


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
def test_a_scan_of_few_columns_has_no_axis_that_no_loop_binds(columns: int) -> None:
    """Unrolled, the first of two columns is a sum over one, and what is more."""
    check(lambda x: torch.relu(torch.cumsum(torch.relu(x), 1)), values(3, columns))


def test_a_sum_with_a_sink_is_split_in_the_kernel_of_its_scores() -> None:
    """Both are inlined there: an axis of its own is bound by the kernel that is made of them."""

    def weights(q: torch.Tensor, k: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        scores = torch.cat([q @ k.mT, sink[:, None, None].expand(-1, q.shape[1], 1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return torch.softmax(scores, -1)[..., :-1]

    given = [values(4, 64, 32), values(4, 64, 32), values(4)]
    *_, kernel = fusec.kernels(weights, *given)
    sums = re.findall(r"sum\((\w+):", kernel.notation)
    assert sums and all(f"{axis}:64" in kernel.notation for axis in sums)
    check(weights, *given)
