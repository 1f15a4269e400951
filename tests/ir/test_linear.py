"""What is linear in the loads of some buffers, and in which nodes."""

from __future__ import annotations

import pytest

from fusec.ir.dtype import BF16, F32, I64
from fusec.ir.expr import Cast, Expr, IndexValue, Op, Select
from fusec.ir.index import Runtime, index
from fusec.ir.linear import is_linear, multiples, terms
from fusec.ir.monoid import MAX, SUM
from tests.ir.graphs import axes, buffer, f32, load, total

(AXIS,) = axes("i", 8)
X, A, PLACES = buffer("x", 8), buffer("a", 8), buffer("places", 8, dtype=I64)
x, a = load(X, AXIS), load(A, AXIS)
CONDITION = Op("gt", (a, f32(0.0)))


def op(name: str, *args: Expr) -> Op:
    return Op(name, args)


def gathered(source: Expr) -> Expr:
    """Return ``x`` at a place that is loaded, or computed from ``source``."""
    return load(X, index(Runtime(source, index(8))))


LINEAR: dict[str, Expr] = {
    "x": x,
    "multiples": op("add", op("mul", a, x), op("neg", op("div", x, a))),
    "a condition": Select(CONDITION, x, f32(0.0)),
    "both branches": Select(CONDITION, x, op("mul", x, a)),
    "a sum": total(SUM, AXIS, op("mul", x, a)),
    "rounded": op("round_bf16", Cast(Cast(x, BF16), F32)),
    "another place": gathered(load(PLACES, AXIS)),
    "guarded": load(X, AXIS, guard=CONDITION),
    "zero": f32(0.0),
}
OTHERS: dict[str, Expr] = {
    "plus 1": op("add", x, f32(1.0)),
    "squared": op("mul", x, x),
    "divisor": op("div", a, x),
    "a function": op("exp", x),
    "its condition": Select(op("gt", x, f32(0.0)), x, f32(0.0)),
    "another branch": Select(CONDITION, x, a),
    "a maximum": total(MAX, AXIS, x),
    "an integer": Cast(x, I64),
    "its place": gathered(Cast(x, I64)),
    "its guard": load(X, AXIS, guard=op("gt", x, f32(0.0))),
    "a number": IndexValue(index(AXIS)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_multiples_sums_and_selections_are_linear(name: str) -> None:
    assert is_linear(LINEAR[name], {X})


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_not(name: str) -> None:
    assert not is_linear(OTHERS[name], {X})


def test_a_sum_of_what_varies_together_is_linear_in_all_of_it_at_once() -> None:
    assert is_linear(op("add", x, a), {X, A})
    assert not is_linear(op("mul", x, a), {X, A})


def test_a_term_knows_the_conditions_that_it_is_under() -> None:
    node = Select(CONDITION, op("mul", x, f32(2.0)), f32(0.0))
    varying = {node, node.then, x}
    assert list(terms(node, varying)) == [(x, frozenset({CONDITION}))]


def test_shared_terms_are_visited_once() -> None:
    node: Expr = x
    for _ in range(64):
        node = Select(CONDITION, node, op("add", node, node))
    assert is_linear(node, {X})


def test_a_factor_that_all_terms_share_is_taken_out() -> None:
    inner, outer = axes("k g", 8, 8)
    x, c, d = (load(buffer(name, 8), inner) for name in "xcd")
    s, z = (load(buffer(name, 8), outer) for name in "sz")
    shared = op("add", op("mul", x, op("mul", c, s)), op("mul", op("mul", s, d), x))
    rest = op("add", op("mul", c, x), op("mul", d, x))
    assert multiples(shared, {inner}) == {s: rest}
    for other in (
        op("add", op("mul", x, op("mul", c, s)), op("mul", x, d)),
        op("add", op("mul", x, s), op("mul", x, z)),
        op("mul", x, f32(2.0)),
        op("add", op("mul", c, s), s),
        op("add", op("mul", c, s), z),
    ):
        assert multiples(other, {inner}) == {None: other}
    assert multiples(shared, {inner, outer}) == {None: shared}


def test_a_zero_point_is_a_term_of_its_own() -> None:
    inner, outer = axes("k g", 8, 8)
    x, y, c, d = (load(buffer(name, 8), inner) for name in "xycd")
    s, z = (load(buffer(name, 8), outer) for name in "sz")
    low, high = (op("mul", r, op("add", op("mul", w, s), z)) for r, w in ((x, c), (y, d)))
    assert multiples(low, {inner}) == {s: op("mul", c, x), z: x}
    before = op("mul", op("add", z, op("mul", c, s)), x)
    assert multiples(before, {inner}) == {s: op("mul", c, x), z: x}
    both = {s: op("add", op("mul", c, x), op("mul", d, y)), z: op("add", x, y)}
    assert multiples(op("add", low, high), {inner}) == both
    shifted = op("mul", x, op("mul", op("sub", c, z), s))
    assert multiples(shifted, {inner}) == {s: op("mul", c, x), op("mul", op("neg", z), s): x}
