"""The table of monoids as expressions: identities, laws, lanes and parts, over special values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fusec.errors import InternalError, InvalidIR
from fusec.ir.combine import AxisSplit, State, carried, combine, folded, identities, rfactor
from fusec.ir.dtype import BOOL, F32, F64, I32
from fusec.ir.expr import Const, Expr, IndexValue, Op, Reduce, Select
from fusec.ir.index import Axis, index
from fusec.ir.monoid import (
    ALL,
    ANY,
    ARGMAX,
    ARGMIN,
    EXPSUM,
    MAX,
    MIN,
    PROD,
    RECURRENCE,
    SUM,
    Monoid,
)  # fmt: skip
from fusec.ir.verify import verify_expr
from fusec.tools.interpreter.expression import Env
from fusec.tools.interpreter.graph import to_storage
from tests.ir.graphs import axes, buffer, eval_expr, load

NAN, INFINITE = math.nan, math.inf
VALUES = (-INFINITE, -1.0, 0.0, 2.0, INFINITE, NAN)
PAIRS = (ARGMAX, ARGMIN)


def states(monoid: Monoid) -> list[State]:
    """Return states of a reduction, with a NaN's index below those of numbers."""
    if monoid in (ANY, ALL):
        return [(Const(value, BOOL),) for value in (False, True)]
    if monoid not in PAIRS:
        return [(Const(value, F32),) for value in VALUES]
    places = {True: (-7, -3), False: (0, 5)}
    return [
        (Const(value, F32), Const(place, I32))
        for value in VALUES
        for place in places[value != value]
    ]


def pairs(first: tuple[float, ...], second: tuple[float, ...]) -> list[State]:
    return [(Const(a, F32), Const(b, F64)) for a, b in itertools.product(first, second)]


def close(monoid: Monoid, a: State, b: State) -> bool:
    """Return whether states mean the same: of an ``EXPSUM`` the logarithm of its sum counts."""
    found = [numbers(state) for state in (a, b)]
    if monoid is EXPSUM:
        with np.errstate(divide="ignore"):
            found = [[m + float(np.log(total))] for m, total in found]
    return np.allclose(*found, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("monoid", (EXPSUM, RECURRENCE), ids=repr)
def test_combinations_of_pairs_are_associative_and_have_an_identity(monoid: Monoid) -> None:
    (c,) = axes("c", 2)
    exponents = (*VALUES, 1000.0) if monoid is EXPSUM else (-0.5, 0.0, 2.0)
    some = pairs(exponents, (1.0, 3.0))
    nothing = identities(Reduce(monoid, (c,), *some[0]))
    for a, b in itertools.product(some, some):
        assert close(monoid, combine(monoid, nothing, a), a)
        assert close(monoid, combine(monoid, a, nothing), a)
        if not monoid.ordered:
            assert close(monoid, combine(monoid, a, b), combine(monoid, b, a)), (a, b)
    for a, b, c_ in itertools.product(some[::3], some, some):
        left = combine(monoid, combine(monoid, a, b), c_)
        right = combine(monoid, a, combine(monoid, b, c_))
        assert close(monoid, left, right), (a, b, c_)


def test_a_recurrence_is_one_of_its_steps_and_carries_its_result_alone() -> None:
    (c,) = axes("c", 2)
    one, other = (Const(3.0, F32), Const(5.0, F32)), (Const(2.0, F32), Const(7.0, F32))
    assert numbers(combine(RECURRENCE, one, other)) == [6.0, 2.0 * 5.0 + 7.0]
    assert numbers(combine(RECURRENCE, other, one)) == [6.0, 3.0 * 7.0 + 5.0]
    assert carried(Reduce(RECURRENCE, (c,), *one)) == (False, True)
    assert carried(Reduce(ARGMAX, (c,), *one)) == carried(Reduce(EXPSUM, (c,), *one)) == (True,) * 2
    with pytest.raises(InternalError, match="recurrence over lanes"):
        folded(RECURRENCE, (c,), one)


def numbers(state: State) -> list[float]:
    return [float(eval_expr(value, Env())) for value in state]


def same(a: State, b: State) -> bool:
    return np.array_equal(numbers(a), numbers(b), equal_nan=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("monoid", (*PAIRS, SUM, PROD, MAX, MIN, ANY, ALL), ids=repr)
def test_combinations_are_associative_and_commutative_and_have_an_identity(monoid: Monoid) -> None:
    (c,) = axes("c", 2)
    some = states(monoid)
    nothing = identities(Reduce(monoid, (c,), *some[0]))
    for a in some:
        assert same(combine(monoid, nothing, a), a), a
        assert same(combine(monoid, a, nothing), a), a
    for a, b in itertools.product(some, some):
        assert same(combine(monoid, a, b), combine(monoid, b, a)), (a, b)
    for a, b, c_ in itertools.product(some, some, some):
        left = combine(monoid, combine(monoid, a, b), c_)
        assert same(left, combine(monoid, a, combine(monoid, b, c_))), (a, b, c_)


def keyed(rows: list[list[float]], monoid: Monoid) -> tuple[Reduce, Env, Axis, Axis]:
    """Return a reduction of columns of rows, their places as keys: a NaN's are negative."""
    x = buffer("x", len(rows), len(rows[0]))
    env = Env()
    to_storage(x, np.array(rows), env)
    m, c = axes("m c", len(rows), len(rows[0]))
    value = load(x, m, c)
    if monoid not in PAIRS:
        return Reduce(monoid, (c,), value), env, m, c
    place: Expr = IndexValue(index(c), I32)
    key = Select(Op("isnan", (value,)), Op("sub", (place, Const(99, I32))), place)
    return Reduce(monoid, (c,), value, key), env, m, c


def test_a_reduction_has_as_many_bodies_as_its_monoid_has_values() -> None:
    (c,) = axes("c", 2)
    place = IndexValue(index(c), I32)
    with pytest.raises(InvalidIR, match="argmax of 1 values"):
        Reduce(ARGMAX, (c,), place)
    with pytest.raises(InvalidIR, match="sum of 2 values"):
        Reduce(SUM, (c,), place, place)
    verify_expr(Reduce(ARGMAX, (c,), Const(1.0, F32), place), frozenset(), "y")
    with pytest.raises(InvalidIR, match="argmax of f32"):
        verify_expr(Reduce(ARGMAX, (c,), place, Const(1.0, F32)), frozenset(), "y")


ROWS = [
    [1.0, 3.0, 2.0, 3.0],
    [-INFINITE, -INFINITE, -INFINITE, -INFINITE],
    [INFINITE, 0.0, -INFINITE, INFINITE],
    [1.0, NAN, 5.0, NAN],
    [0.0, -4.0, 7.0, -4.0],
]


def test_an_argmax_is_the_first_of_equal_values_or_the_first_nan() -> None:
    greatest, env, *_ = keyed(ROWS, ARGMAX)
    assert eval_expr(greatest, env).tolist() == [1, 0, 0, 1 - 99, 2]
    least, env, *_ = keyed(ROWS, ARGMIN)
    assert eval_expr(least, env).tolist() == [0, 0, 2, 1 - 99, 1]


@pytest.mark.parametrize("monoid", (*PAIRS, MAX, MIN, SUM, PROD), ids=repr)
def test_lanes_fold_to_the_reduction(monoid: Monoid) -> None:
    node, env, _, c = keyed(ROWS, monoid)
    found = eval_expr(folded(monoid, (c,), node.bodies), env)
    np.testing.assert_array_equal(found, eval_expr(node, env))


@pytest.mark.parametrize("monoid", (*PAIRS, MAX, SUM), ids=repr)
def test_what_parts_find_combines_to_the_whole(monoid: Monoid) -> None:
    node, env, _, c = keyed(ROWS, monoid)
    part, within = axes("p i", 2, 2)
    split = AxisSplit(part, (within,), {c: index(part) * 2 + index(within)})
    found = rfactor(node, split)
    assert [one.dtype for one in found] == [body.dtype for body in node.bodies]
    whole = Reduce(monoid, (part,), *found)
    np.testing.assert_array_equal(eval_expr(whole, env), eval_expr(node, env))


@pytest.mark.parametrize("monoid", (EXPSUM, RECURRENCE), ids=repr)
def test_parts_of_pairs_combine_to_the_whole(monoid: Monoid) -> None:
    x = buffer("x", 2, 6)
    env = Env()
    to_storage(x, np.linspace(-1, 1, 12).reshape(2, 6), env)
    (c,) = axes("c", 6)
    node = Reduce(monoid, (c,), load(x, 0, c), load(x, 1, c))
    part, within = axes("p i", 2, 3)
    split = AxisSplit(part, (within,), {c: index(part) * 3 + index(within)})
    whole = Reduce(monoid, (part,), *rfactor(node, split))
    expected = eval_expr(node, env)
    np.testing.assert_allclose(eval_expr(whole, env), expected, rtol=1e-6)
    if not monoid.ordered:
        np.testing.assert_allclose(eval_expr(folded(monoid, (c,), node.bodies), env), expected)


def test_an_ordered_reduction_is_over_one_axis() -> None:
    a, c = axes("a c", 2, 2)
    x = load(buffer("x", 2, 2), a, c)
    verify_expr(Reduce(RECURRENCE, (c,), x, x), frozenset((a,)), "y")
    with pytest.raises(InvalidIR, match="ordered, over several axes"):
        verify_expr(Reduce(RECURRENCE, (a, c), x, x), frozenset(), "y")
