"""Sums over whole rows of a product come in pieces; those over a part of a row stay."""

from __future__ import annotations

import pytest

from fusec.ir.expr import Op
from fusec.ir.graph import Def, Graph
from fusec.ir.monoid import SUM
from fusec.passes.row_parts import WIDTH, sum_rows_by_parts
from tests.ir.graphs import axes, buffer, graph, load, total
from tests.passes.pipelines import check_same, names, numbers

COLUMNS = 3 * WIDTH


def sums_of_a_product(columns: int) -> Graph:
    """Return ``s[m] = sum(j < columns: h[m, j])`` of a product h of 4 by 2 and 2 by COLUMNS."""
    x, w, h, s = buffer("x", 4, 2), buffer("w", 2, COLUMNS), buffer("h", 4, COLUMNS), buffer("s", 4)
    m, n, k, i, j = axes("m n k i j", 4, COLUMNS, 2, 4, columns)
    product = Def(h, (m, n), total(SUM, k, Op("mul", (load(x, m, k), load(w, k, n)))))
    return graph((x, w), (product, Def(s, (i,), total(SUM, j, load(h, i, j)))), s)


def test_a_sum_over_a_row_is_one_over_its_pieces() -> None:
    before = sums_of_a_product(COLUMNS)
    after = sum_rows_by_parts(before)
    assert names(after) == ["h", "s_part", "s"]
    check_same(before, after, (numbers(4, 2), numbers(2, COLUMNS)))


@pytest.mark.parametrize("columns", [8, 2 * WIDTH, WIDTH + 72])
def test_a_sum_over_a_part_of_a_row_stays(columns: int) -> None:
    before = sums_of_a_product(columns)
    after = sum_rows_by_parts(before)
    assert names(after) == ["h", "s"]
    check_same(before, after, (numbers(4, 2), numbers(2, COLUMNS)))
