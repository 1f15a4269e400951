"""Groups of rows by a table of ascending ends: where terms count, and what bounds their loops."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.ir.dtype import I32
from fusec.ir.expr import Const, Expr, IndexValue, Op, Reduce, Select, postorder
from fusec.ir.groups import (
    group_axes,
    groups_of,
    member_edges,
    pairs_of,
    rows_of_a_group,
    visited,
)
from fusec.ir.index import Axis, Runtime, index
from fusec.ir.monoid import MAX, SUM
from fusec.tools.interpreter.expression import Env, eval_tile, expand
from tests.ir.graphs import axes, buffer, f32, load

S, E, K, N = 10, 4, 3, 2
ENDS = buffer("ends", E, dtype=I32)
X, W, Y = buffer("x", S, K), buffer("w", E, K, N), buffer("y", S, N)
SPLIT = np.array([2, 2, 7, 9])


def member(s: Axis, e: Axis) -> Op:
    first = Op("ge", (IndexValue(index(e), I32), Const(1, I32)))
    begin = load(ENDS, index(e) - 1, guard=first)
    return Op("member", (IndexValue(index(s), I32), begin, load(ENDS, e)))


def of_each_group() -> tuple[Reduce, tuple[Axis, ...]]:
    """y[s, n] = sum(e: where(s in group e, sum(k: x[s, k] * w[e, k, n]), 0))"""
    s, e, k, n = axes("s e k n", S, E, K, N)
    product = Reduce(SUM, (k,), Op("mul", (load(X, s, k), load(W, e, k, n))))
    return Reduce(SUM, (e,), Select(member(s, e), product, f32(0))), (s, n, e)


def of_its_rows() -> tuple[Reduce, tuple[Axis, ...]]:
    """w[e, k, n] = sum(s: x[s, k] * y[s, n] if s in group e)"""
    s, e, k, n = axes("s e k n", S, E, K, N)
    own = member(s, e)
    terms = Op("mul", (load(X, s, k, guard=own), load(Y, s, n, guard=own)))
    return Reduce(SUM, (s,), terms), (e, k, n, s)


def value(node: Expr, over: tuple[Axis, ...]) -> np.ndarray:
    numbers, env = np.random.default_rng(0), Env()
    shapes = (X, (S, K)), (W, (E, K, N)), (Y, (S, N))
    env.storage = {b: numbers.standard_normal(s).astype(np.float32).ravel() for b, s in shapes}
    env.storage[ENDS] = SPLIT
    return expand(eval_tile(node, env), over, env)


def test_a_row_counts_in_the_group_that_it_is_in() -> None:
    s, e = axes("s e", S, E)
    found = value(member(s, e), (e, s))
    assert [row.nonzero()[0].tolist() for row in found] == [[0, 1], [], [*range(2, 7)], [7, 8]]


def test_a_sum_over_groups_names_their_axis_and_rows() -> None:
    node, (s, _, e) = of_each_group()
    groups = groups_of(node)
    assert groups is not None and (groups.axis, groups.row) == (e, index(s))
    assert groups.end is load(ENDS, e)
    assert group_axes([n for n in postorder((node,)) if isinstance(n, Reduce)]) == {e}


@pytest.mark.parametrize("monoid", [MAX, SUM])
def test_other_sums_run_over_no_groups(monoid: str) -> None:
    node, _ = of_its_rows()
    assert groups_of(node) is None
    s, e = axes("s e", S, E)
    other = Const(1.0, f32(0).dtype)
    assert groups_of(Reduce(monoid, (e,), Select(member(s, e), load(W, e, 0, 0), other))) is None


def test_the_rows_of_a_group_lie_between_two_numbers_that_are_read() -> None:
    s, e = axes("s e", S, E)
    condition = member(s, e)
    _, begin, end = condition.args
    first, last = member_edges(Op("and", (condition, condition)))[:2]
    assert first is index(Runtime(begin, index(S + 1))) - index(s)
    assert last is index(s) - index(Runtime(end, index(S + 1))) + 1
    assert member_edges(Op("not", (condition,))) == ()


@pytest.mark.parametrize("make", [of_each_group, of_its_rows])
def test_each_row_is_visited_in_one_group_only(make: object) -> None:
    node, named = make()  # type: ignore[operator]
    s, e = (next(a for a in named if a.name == name) for name in "se")
    pairs = pairs_of(postorder((node,)))
    assert pairs == {e: frozenset((s,))}
    assert visited(frozenset(named), pairs) == frozenset(named) - {e}
    assert visited(frozenset((e,)), pairs) == {e}
    assert rows_of_a_group(pairs) == {s: S // E}
