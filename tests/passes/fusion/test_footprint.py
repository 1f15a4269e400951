"""What a kernel touches, each element once, beside the elements counted one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest

from fusec.ir.expr import Expr, Op, Select
from fusec.ir.graph import Def, Graph
from fusec.ir.index import index
from fusec.ir.monoid import SUM
from fusec.passes.fusion.footprint import kernel_traffic
from tests.ir.graphs import axes, below, buffer, f32, graph, load, total
from tests.passes.fusion.test_cost import unified

Place = Callable[[Any], Any]
"""An index of a point's coordinate: of a number, or of an axis as an index."""

CASES: dict[str, tuple[int, tuple[Place, ...]]] = {
    "all of it": (24, (lambda i: i,)),
    "a half": (12, (lambda i: i + 12,)),
    "two halves": (12, (lambda i: i, lambda i: i + 12)),
    "neighbours": (20, (lambda i: i, lambda i: i + 1, lambda i: i + 2)),
    "every second": (12, (lambda i: 2 * i,)),
    "pairs": (12, (lambda i: 2 * i, lambda i: 2 * i + 1)),
    "each twice": (24, (lambda i: i // 2,)),
    "again and again": (24, (lambda i: i % 8,)),
    "forwards and backwards": (24, (lambda i: i, lambda i: 23 - i)),
    "a part of what is read anyway": (12, (lambda i: i, lambda i: i % 3 + 4)),
    "blocks": (24, (lambda i: i // 4 * 4 + i % 4,)),
}


def traffic(before: Graph) -> dict[str, tuple[int, int]]:
    return {b.name: both for b, both in kernel_traffic(unified(before)).items()}


@pytest.mark.parametrize("case", CASES)
def test_an_element_counts_once_however_often_it_is_read(case: str) -> None:
    extent, places = CASES[case]
    (i,) = axes("i", extent)
    x, y = buffer("x", 24), buffer("y", extent)
    read: list[Expr] = [load(x, place(index(i))) for place in places]
    line = Def(y, (i,), reduce(lambda a, b: Op("add", (a, b)), read))
    touched = {place(n) for place in places for n in range(extent)}
    assert traffic(graph((x,), (line,), y)) == {"x": (4 * len(touched), 0), "y": (0, 4 * extent)}


def test_tiles_of_a_matrix_overlap_in_a_rectangle() -> None:
    """Rows 0 to 3 of all columns, and column 2 of all rows: 4*6 + 8 - 4 elements."""
    x, y = buffer("x", 8, 6), buffer("y", 8, 6)
    r, c = axes("r c", 8, 6)
    read = Op("add", (load(x, index(r) // 2, c), load(x, r, 2)))
    assert traffic(graph((x,), (Def(y, (r, c), read),), y))["x"] == (4 * 28, 0)


def test_a_place_outside_of_a_buffer_is_not_read() -> None:
    x, y = buffer("x", 10), buffer("y", 16)
    (i,) = axes("i", 16)
    padded = load(x, index(i) - 12, guard=below(11, i))
    assert traffic(graph((x,), (Def(y, (i,), padded),), y))["x"] == (4 * 4, 0)


GUARDS: dict[str, Callable[[int], bool]] = {
    "a prefix": lambda i: i < 9,
    "the rest": lambda i: i >= 9,
    "a part": lambda i: 3 <= i < 9,
    "backwards": lambda i: 20 - 2 * i < 5,
}
CONDITIONS = {
    "a prefix": lambda i: below(i, 9),
    "the rest": lambda i: Op("not", (below(i, 9),)),
    "a part": lambda i: Op("and", (Op("not", (below(i, 3),)), below(i, 9))),
    "backwards": lambda i: below(20 - 2 * i, 5),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_load_reads_where_its_guard_holds(guard: str) -> None:
    x, y = buffer("x", 48), buffer("y", 24)
    (i,) = axes("i", 24)
    line = Def(y, (i,), load(x, index(i) * 2, guard=CONDITIONS[guard](index(i))))
    assert traffic(graph((x,), (line,), y))["x"] == (4 * sum(map(GUARDS[guard], range(24))), 0)


def attention(queries: int, keys: int, *, masked: bool) -> Graph:
    """y[m, c] = sum(n: where(n <= m, sum(d: q[m, d]*k[n, d]), 0) * v[n, c]), or of all keys."""
    q, k, v = buffer("q", queries, 16), buffer("k", keys, 16), buffer("v", keys, 16)
    y = buffer("y", queries, 16)
    m, c, n, d = axes("m c n d", queries, 16, keys, 16)
    score: Expr = total(SUM, d, Op("mul", (load(q, m, d), load(k, n, d))))
    if masked:
        score = Select(below(n, index(m) + 1), score, f32(0))
    return graph((q, k, v), (Def(y, (m, c), total(SUM, n, Op("mul", (score, load(v, n, c))))),), y)


@pytest.mark.parametrize(("queries", "keys", "read"), [(8, 24, 8), (24, 8, 8)])
def test_a_loop_of_products_reads_what_some_row_counts(queries: int, keys: int, read: int) -> None:
    found = traffic(attention(queries, keys, masked=True))
    assert found["k"] == found["v"] == (4 * 16 * read, 0)
    assert found["q"] == (4 * 16 * queries, 0)
    assert traffic(attention(queries, keys, masked=False))["k"] == (4 * 16 * keys, 0)
