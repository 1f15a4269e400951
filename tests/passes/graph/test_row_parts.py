"""Sums over whole rows of a product come in parts; those over a part of a row stay."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.codegen.targets import HOPPER_MACHINE
from fusec.ir.dtype import F32
from fusec.ir.expr import Const, Op
from fusec.ir.graph import Def, Graph
from fusec.ir.monoid import SUM
from fusec.ir.verify import verify_graph
from fusec.passes.graph.row_parts import sum_rows_by_parts
from fusec.passes.graph.split_reduction import split_reduction
from fusec.tools.interpreter.graph import run_graph
from tests.ir.graphs import axes, buffer, graph, load, total
from tests.passes.pipelines import check_same, names, numbers

WIDTH = 128
COLUMNS = 3 * WIDTH


def sums_of_a_product(columns: int) -> Graph:
    """Return ``s[m] = sum(j < columns: h[m, j])`` of a product h of 4 by 2 and 2 by COLUMNS."""
    x, w, h, s = buffer("x", 4, 2), buffer("w", 2, COLUMNS), buffer("h", 4, COLUMNS), buffer("s", 4)
    m, n, k, i, j = axes("m n k i j", 4, COLUMNS, 2, 4, columns)
    product = Def(h, (m, n), total(SUM, k, Op("mul", (load(x, m, k), load(w, k, n)))))
    return graph((x, w), (product, Def(s, (i,), total(SUM, j, load(h, i, j)))), s)


def test_a_sum_over_a_row_is_one_over_its_parts() -> None:
    before = sums_of_a_product(COLUMNS)
    after = sum_rows_by_parts(before, WIDTH)
    assert names(after) == ["h", "s_part", "s"]
    check_same(before, after, (numbers(4, 2), numbers(2, COLUMNS)))


def test_squares_about_a_row_s_mean_are_those_about_the_means_of_its_parts() -> None:
    """With n = p*128 + i: each part waits for its own sum alone, in the product's tile."""
    x, w, h = buffer("x", 4, 2), buffer("w", 2, COLUMNS), buffer("h", 4, COLUMNS)
    mean, v = buffer("mean", 4), buffer("v", 4)
    m, n, k, i, j, a, b = axes("m n k i j a b", 4, COLUMNS, 2, 4, COLUMNS, 4, COLUMNS)
    product = Def(h, (m, n), total(SUM, k, Op("mul", (load(x, m, k), load(w, k, n)))))
    length = Const(float(COLUMNS), F32)
    average = Def(mean, (i,), Op("div", (total(SUM, j, load(h, i, j)), length)))
    away = Op("sub", (load(h, a, b), load(mean, a)))
    squares = Def(v, (a,), total(SUM, b, Op("mul", (away, away))))
    before = graph((x, w), (product, average, squares), mean, v)
    after = sum_rows_by_parts(before, WIDTH)
    assert {line.buffer.name: {b.name for b in line.reads} for line in after.defs} == {
        "h": {"x", "w"},
        "mean_part": {"h"},
        "mean": {"mean_part"},
        "v_part": {"h", "mean_part"},
        "v": {"v_part", "mean_part", "mean"},
    }
    verify_graph(after)
    inputs = (numbers(4, 2), numbers(2, COLUMNS))
    for one, other in zip(run_graph(before, inputs), run_graph(after, inputs), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)


def test_the_sum_of_a_row_s_parts_is_read_at_once_and_split_no_more() -> None:
    """Its parts lie beside each other: a column sum of so many rows would be split."""
    rows, columns = 4096, 16 * WIDTH
    x, w = buffer("x", rows, 2), buffer("w", 2, columns)
    h, s = buffer("h", rows, columns), buffer("s", rows)
    m, n, k, i, j = axes("m n k i j", rows, columns, 2, rows, columns)
    product = Def(h, (m, n), total(SUM, k, Op("mul", (load(x, m, k), load(w, k, n)))))
    before = graph((x, w), (product, Def(s, (i,), total(SUM, j, load(h, i, j)))), s)
    after = sum_rows_by_parts(before, WIDTH)
    assert names(after) == ["h", "s_part", "s"]
    assert split_reduction(after, HOPPER_MACHINE) is after


@pytest.mark.parametrize("columns", [8, 2 * WIDTH, WIDTH + 72])
def test_a_sum_over_a_part_of_a_row_stays(columns: int) -> None:
    before = sums_of_a_product(columns)
    after = sum_rows_by_parts(before, WIDTH)
    assert names(after) == ["h", "s"]
    check_same(before, after, (numbers(4, 2), numbers(2, COLUMNS)))
