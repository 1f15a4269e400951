"""Loops over groups of rows: every stage computes the same, and skips what a tile does not meet."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.ir.dtype import I32
from fusec.ir.expr import Const, Op, Reduce, Select
from fusec.ir.graph import Def, Graph
from fusec.ir.index import Axis, index
from fusec.ir.monoid import SUM
from fusec.ir.program import For, Program, statements
from tests.ir.graphs import axes, buffer, f32, graph, load, position
from tests.passes.pipelines import check_full, numbers

S, E, K, N = 70, 5, 32, 24
ENDS = buffer("ends", E, dtype=I32)
X, W, Y = buffer("x", S, K), buffer("w", E, K, N), buffer("y", S, N)
SPLITS = [(9, 9, 40, 41, 70), (0, 0, 0, 0, 70), (70, 70, 70, 70, 70), (1, 2, 3, 4, 5)]


def member(s: Axis, e: Axis) -> Op:
    begin = load(ENDS, index(e) - 1, guard=Op("ge", (position(e, I32), Const(1, I32))))
    return Op("member", (position(s, I32), begin, load(ENDS, e)))


def of_each_group() -> Graph:
    s, n, e, k = axes("s n e k", S, N, E, K)
    product = Reduce(SUM, (k,), Op("mul", (load(X, s, k), load(W, e, k, n))))
    total = Reduce(SUM, (e,), Select(member(s, e), product, f32(0)))
    out = buffer("out", S, N)
    return graph((X, W, ENDS), (Def(out, (s, n), total),), out)


def of_its_rows() -> Graph:
    e, k, n, s = axes("e k n s", E, K, N, S)
    own = member(s, e)
    terms = Op("mul", (load(X, s, k, guard=own), load(Y, s, n, guard=own)))
    out = buffer("out", E, K, N)
    return graph((X, Y, ENDS), (Def(out, (e, k, n), Reduce(SUM, (s,), terms)),), out)


def loops(program: Program) -> list[For]:
    return [s for s in statements(program.body) if isinstance(s, For)]


@pytest.mark.parametrize("split", SPLITS)
def test_a_tile_runs_over_the_groups_of_its_rows(split: tuple[int, ...]) -> None:
    given = numbers(S, K, seed=1), numbers(E, K, N, seed=2), np.array(split)
    _, programs = check_full(of_each_group(), given, "sm_90")
    (program,) = programs.values()
    over, terms = loops(program)
    assert over.axis.name == "e" and over.start is not index(0) and len(over.stops) == 2
    assert len(terms.stops) == 2 and terms.start is index(0)
    assert {a.extent for a in program.lanes} >= {index(8)}  # all ends at once, in 8 lanes


@pytest.mark.parametrize("split", SPLITS)
def test_a_sum_over_a_group_runs_over_its_rows(split: tuple[int, ...]) -> None:
    given = numbers(S, K, seed=1), numbers(S, N, seed=2), np.array(split)
    _, programs = check_full(of_its_rows(), given, "sm_90")
    (loop,) = loops(*programs.values())
    assert loop.start is not index(0) and len(loop.stops) == 2
    assert loop.start.axes == frozenset()


@pytest.mark.parametrize("make", [of_each_group, of_its_rows])
def test_a_cpu_runs_over_all_and_computes_the_same(make: object) -> None:
    second = numbers(E, K, N, seed=2) if make is of_each_group else numbers(S, N, seed=2)
    check_full(make(), (numbers(S, K, seed=1), second, np.array(SPLITS[0])))  # type: ignore[operator]
