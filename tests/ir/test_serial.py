"""Scatters and scans are recognised by their comparisons, and mean what these compare."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.ir.dtype import BOOL, F32, I64
from fusec.ir.expr import Const, Expr, IndexValue, Load, Op, Reduce, Select, both
from fusec.ir.index import Axis, index
from fusec.ir.monoid import ARGMAX, MAX, PROD, RECURRENCE, SUM, Monoid
from fusec.ir.serial import from_the_end, hits_of, runs_backwards, scan_of, serial_axes, turned
from fusec.tools.interpreter.expression import Env, eval_tile, expand
from fusec.tools.interpreter.graph import to_storage
from tests.ir.graphs import axes, buffer, eval_expr, f32, load

N, E, C = 5, 40, 3
X, P, Q = buffer("x", E, C), buffer("p", E, dtype=I64), buffer("q", E, dtype=I64)
NUMBERS = np.random.default_rng(0)
VALUES = NUMBERS.standard_normal((E, C)).astype(np.float32)
PLACES, OTHERS = NUMBERS.integers(0, N, E), NUMBERS.integers(0, C, E)


def hits(axis: Axis, place: Expr) -> Expr:
    return Op("hits", (IndexValue(index(axis)), place))


def until(last: Axis, along: Axis) -> Expr:
    return Op("until", (IndexValue(index(last)), IndexValue(index(along))))


def scatter(monoid: Monoid = SUM, *, guard: Expr | None = None) -> tuple[Reduce, Axis, Axis]:
    """y[n, c] = reduce(e: where(hits(n, p[e]) [and guard], x[e, c], identity))."""
    n, e, c = axes("n e c", N, E, C)
    condition = both(hits(n, load(P, e)), guard)
    assert condition is not None
    neutral = Const(monoid.identity(F32), F32)
    return Reduce(monoid, (e,), Select(condition, load(X, e, c), neutral)), n, c


def value(node: Expr, over: tuple[Axis, ...]) -> np.ndarray:
    env = Env()
    env.storage = {X: VALUES.reshape(-1), P: PLACES, Q: OTHERS}
    return expand(eval_tile(node, env), over, env)


@pytest.mark.parametrize(
    ("monoid", "combine"), [(SUM, np.add), (PROD, np.multiply), (MAX, np.maximum)], ids=str
)
def test_a_scatter_combines_each_source_where_it_hits(monoid: Monoid, combine: np.ufunc) -> None:
    node, n, c = scatter(monoid)
    assert [(hit.axis, hit.place) for hit in hits_of(node)] == [(n, load(P, node.over[0]))]
    wanted = np.full((N, C), monoid.identity(F32))
    combine.at(wanted, PLACES, VALUES.astype(np.float64))
    assert np.allclose(value(node, (n, c)), wanted, rtol=1e-6)


def test_a_scatter_hits_along_two_axes() -> None:
    n, m, e = axes("n m e", N, C, E)
    condition = both(hits(n, load(P, e)), hits(m, load(Q, e)))
    assert condition is not None
    node = Reduce(SUM, (e,), Select(condition, load(X, e, 0), f32(0)))
    assert {hit.axis for hit in hits_of(node)} == {n, m} == serial_axes((node,))
    wanted = np.zeros((N, C))
    np.add.at(wanted, (PLACES, OTHERS), VALUES[:, 0].astype(np.float64))
    assert np.allclose(value(node, (n, m)), wanted, rtol=1e-6)


def test_a_guarded_load_scatters() -> None:
    n, e, c = axes("n e c", N, E, C)
    node = Reduce(SUM, (e,), Load(X, (index(e), index(c)), hits(n, load(P, e))))
    assert hits_of(node)
    assert np.allclose(value(node, (n, c)), value((same := scatter())[0], same[1:]))


def test_out_of_range_hits_nothing() -> None:
    n, e = axes("n e", N, E)
    place = Op("sub", (load(P, e), Const(2, I64)))
    node = Reduce(SUM, (e,), Select(hits(n, place), load(X, e, 0), f32(0)))
    wanted = np.zeros(N)
    np.add.at(wanted, PLACES[PLACES >= 2] - 2, VALUES[PLACES >= 2, 0].astype(np.float64))
    assert np.allclose(value(node, (n,)), wanted, rtol=1e-6)


def test_a_part_of_an_axis_begins_elsewhere() -> None:
    n, e = axes("n e", N - 2, E)
    here = IndexValue(index(n) + 2)
    node = Reduce(SUM, (e,), Select(Op("hits", (here, load(P, e))), load(X, e, 0), f32(0)))
    (hit,) = hits_of(node)
    assert hit.axis is n and hit.before is index(2)
    wanted = np.zeros(N)
    np.add.at(wanted, PLACES, VALUES[:, 0].astype(np.float64))
    assert np.allclose(value(node, (n,)), wanted[2:], rtol=1e-6)


def test_places_may_vary_along_the_result() -> None:
    n, e, c = axes("n e c", N, E, C)
    place = Op("add", (load(P, e), IndexValue(index(c))))
    node = Reduce(SUM, (e,), Select(hits(n, place), load(X, e, c), f32(0)))
    assert [hit.place for hit in hits_of(node)] == [place]
    wanted = np.zeros((N + C, C))
    np.add.at(wanted, (PLACES[:, None] + np.arange(C), np.arange(C)), VALUES.astype(np.float64))
    assert np.allclose(value(node, (n, c)), wanted[:N], rtol=1e-6)


@pytest.mark.parametrize("what", ["place of the axis", "steps of two", "no unless"])
def test_what_is_no_scatter(what: str) -> None:
    n, e, c = axes("n e c", N, E, C)
    place: Expr = load(P, e)
    here: Expr = IndexValue(index(n))
    other = f32(0)
    if what == "place of the axis":
        place = Op("add", (place, IndexValue(index(n))))
    elif what == "steps of two":
        here = IndexValue(index(n) * 2)
    else:
        other = f32(1)
    node = Reduce(SUM, (e,), Select(Op("hits", (here, place)), load(X, e, c), other))
    assert hits_of(node) == ()
    assert value(node, (n, c)).shape == (N, C)


def prefixes(monoid: Monoid = SUM, **guards: bool) -> tuple[Reduce, Axis, Axis]:
    """y[i, c] = reduce(j: where(until(j, i), x[j, c], identity))."""
    i, j, c = axes("i j c", E, E, C)
    term: Expr = Op("mul", (load(X, j, c), f32(2)))
    if guards.get("own"):
        term = Op("sub", (term, load(X, i, c)))
    neutral = Const(monoid.identity(F32), F32)
    return Reduce(monoid, (j,), Select(until(j, i), term, neutral)), i, c


def test_a_scan_combines_the_terms_so_far() -> None:
    node, i, c = prefixes()
    scan = scan_of(node)
    assert scan is not None and scan.over == (i,) and serial_axes((node,)) == {i}
    assert scan.bodies == (Op("mul", (load(X, i, c), f32(2))),)
    wanted = 2 * VALUES.astype(np.float64).cumsum(0)
    assert np.allclose(value(node, (i, c)), wanted, rtol=1e-6)
    assert np.allclose(value(scan, (i, c)), wanted, rtol=1e-6)


def test_terms_with_a_sum_that_binds_the_axis_again_are_scanned() -> None:
    """x[j] less a sum over j, in which a sum over i varies along that j (a softmax backward)."""
    i, j, c = axes("i j c", E, E, C)
    inner = Reduce(SUM, (i,), Op("mul", (load(X, i, c), load(X, j, c))))
    term = Op("sub", (Op("mul", (load(X, j, c), inner)), Reduce(SUM, (j,), inner)))
    scan = scan_of(Reduce(SUM, (j,), Select(until(j, i), term, f32(0))))
    assert scan is not None and scan.over == (i,)
    sums = VALUES.astype(np.float64).sum(0)
    wanted = (VALUES * VALUES * sums - sums * sums).cumsum(0)
    assert np.allclose(value(scan, (i, c)), wanted, rtol=1e-4, atol=1e-3)


def test_terms_that_vary_with_the_end_are_no_scan() -> None:
    node, i, c = prefixes(own=True)
    assert scan_of(node) is None
    compared = 2 * VALUES.cumsum(0) - np.arange(1, E + 1)[:, None] * VALUES
    assert np.allclose(value(node, (i, c)), compared, rtol=1e-4, atol=1e-5)


def test_a_scan_finds_the_place_of_the_extreme() -> None:
    i, j = axes("i j", E, E)
    least = Const(ARGMAX.identity(I64), I64)
    bodies = (
        Select(until(j, i), load(X, j, 0), Const(MAX.identity(F32), F32)),
        Select(until(j, i), IndexValue(index(j)), least),
    )
    node = Reduce(ARGMAX, (j,), *bodies)
    scan = scan_of(node)
    assert scan is not None and scan.bodies == (load(X, i, 0), IndexValue(index(i)))
    wanted = [int(VALUES[: k + 1, 0].argmax()) for k in range(E)]
    assert value(node, (i,)).tolist() == wanted
    assert value(scan, (i,)).tolist() == wanted


def test_axes_of_other_lengths_are_no_scan() -> None:
    i, j = axes("i j", E - 1, E)
    node = Reduce(SUM, (j,), Select(until(j, i), load(X, j, 0), f32(0)))
    assert scan_of(node) is None


def test_a_scan_that_runs_backwards() -> None:
    i, j = axes("i j", 9, 9)
    x = buffer("x", 9)
    forwards, backwards = (
        Reduce(SUM, (j,), Select(condition, load(x, j), f32(0)))
        for condition in (until(j, i), until(i, j))
    )
    assert scan_of(forwards) is scan_of(backwards) is not None
    assert runs_backwards(backwards) and not runs_backwards(forwards)
    env = Env()
    to_storage(x, np.arange(9.0), env)
    np.testing.assert_array_equal(eval_expr(backwards, env), np.arange(9.0)[::-1].cumsum()[::-1])


def test_a_scan_that_is_read_from_its_end_runs_backwards() -> None:
    i, j = axes("i j", 9, 9)
    x = buffer("x", 9)
    node = Reduce(SUM, (j,), Select(until(j, i), load(x, j), f32(0))).substitute({i: turned(i)})
    assert scan_of(node) is None
    found = from_the_end(node)
    assert runs_backwards(found) and from_the_end(found) is found
    env = Env()
    to_storage(x, np.arange(9.0), env)
    np.testing.assert_array_equal(eval_expr(found, env), eval_expr(node, env))
    np.testing.assert_array_equal(eval_expr(found, env), np.arange(9.0).cumsum()[::-1])


def test_a_recurrence_by_truth_values_takes_the_state_before_or_nothing() -> None:
    i, j = axes("i j", 4, 4)
    x, keeps = buffer("x", 4), buffer("keeps", 4, dtype=BOOL)
    factor = Select(until(j, i), load(keeps, j), Const(True, BOOL))
    node = Reduce(RECURRENCE, (j,), factor, Select(until(j, i), load(x, j), f32(-0.0)))
    env = Env()
    to_storage(x, np.array([np.inf, 2.0, 3.0, 4.0]), env)
    to_storage(keeps, np.array([True, False, True, False]), env)
    np.testing.assert_array_equal(eval_expr(node, env), [np.inf, 2, 5, 4])


def test_a_recurrence_scans_where_both_of_its_terms_are_the_identity_otherwise() -> None:
    i, j = axes("i j", 9, 9)
    x = buffer("x", 9)
    factor = Select(until(j, i), load(x, j), f32(1))
    term = Select(until(j, i), load(x, j), f32(-0.0))
    assert scan_of(Reduce(RECURRENCE, (j,), factor, term)) is not None
    assert scan_of(Reduce(RECURRENCE, (j,), f32(1), term)) is not None
    assert scan_of(Reduce(RECURRENCE, (j,), load(x, j), term)) is None
