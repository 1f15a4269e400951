"""Simplification keeps every value: the cases that a rule once got wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from fusec.ir.dtype import BOOL, F32, I64
from fusec.ir.expr import (
    Buffer,
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Select,
    loads,
    postorder,
)
from fusec.ir.graph import Def, Graph, View
from fusec.ir.index import Axis, Runtime, index
from fusec.ir.strides import contiguous_strides
from fusec.passes.graph.simplify import simplify
from fusec.tools.interpreter.graph import run_graph
from tests.fuzz.graphs import Example
from tests.ir.graphs import axes, buffer, f32, graph, load, position
from tests.passes.pipelines import BOUNDED, check_same, random_graphs
from tests.philox import uniforms


def test_a_guard_without_a_part_in_the_index_still_gives_zero():
    """``b[j] if i < 4`` is 0 from i = 4 on, although ``b[j]`` could be read anywhere."""
    row = (index(7),)
    b = Buffer("b", row, contiguous_strides(row), F32)
    shape = (index(6), index(7))
    out = Buffer("out", shape, contiguous_strides(shape), F32)
    i, j = Axis("i", index(6)), Axis("j", index(7))
    guard = Op("lt", (IndexValue(index(i)), IndexValue(index(4))))
    line = Def(out, (i, j), Load(b, (index(j),), guard))
    graph = Graph("g", (b,), (line,), (View(out, shape, out.strides, index(0)),))
    values = np.arange(1, 8, dtype=np.float32)
    (result,) = run_graph(simplify(graph), [values])
    expected = np.where(np.arange(6)[:, None] < 4, values, 0)
    np.testing.assert_array_equal(result, expected)


def ignored_targets() -> Graph:
    """``where(t != -100, x[where(t != -100, t, 0)], 0)``, as a loss ignores some targets."""
    x, t, out = buffer("x", 5), buffer("t", 4, dtype=I64), buffer("out", 4)
    (i,) = axes("i", 4)
    wanted = Op("ne", (load(t, i), Const(-100, I64)))
    safe = Select(wanted, load(t, i), Const(0, I64))
    picked = load(x, index(Runtime(safe, index(5))))
    return graph((x, t), (Def(out, (i,), Select(wanted, picked, f32(0))),), out)


def test_a_load_below_a_selection_that_made_its_index_safe_stays_guarded() -> None:
    before = ignored_targets()
    inputs = (np.array([10.0, 11, 12, 13, 14]), np.array([4, -100, 0, -100]))
    after = simplify(before)  # the interpreter raises where a load is out of range
    (result,) = run_graph(after, inputs)
    np.testing.assert_array_equal(result, [14, 0, 10, 0])
    (line,) = after.nodes
    assert isinstance(line, Def)
    assert all(n.guard is not None for n in loads((line.expr,)) if n.buffer.name == "x")


def out_of(expr: Expr, i: Axis, *inputs: Buffer) -> Graph:
    out = buffer("out", i.extent, dtype=expr.dtype)
    return graph(inputs, (Def(out, (i,), expr),), out)


def simplified(expr: Expr, i: Axis, *inputs: Buffer) -> Expr:
    (line,) = simplify(out_of(expr, i, *inputs)).nodes
    assert isinstance(line, Def)
    return line.expr


def test_comparisons_that_bounds_decide_are_constants() -> None:
    (i,) = axes("i", 4)
    for name, bound, verdict in (("lt", 4, True), ("ge", 4, False), ("le", 3, True)):
        assert simplified(Op(name, (position(i), position(bound))), i) is Const(verdict, BOOL)
    undecided = Op("lt", (position(i), position(3)))
    assert isinstance(simplified(undecided, i), Op)


def test_the_negation_of_what_its_parts_decide_is_a_constant() -> None:
    """A window's mask, ``~((n <= m) & (m - n < 7))`` at ``n = m``, hides no key there."""
    (i,) = axes("i", 4)
    both = Op("and", (Op("le", (position(i), position(i))), Op("lt", (position(i), position(7)))))
    assert simplified(Op("not", (both,)), i) is Const(False, BOOL)


@pytest.mark.parametrize(("divisor", "exact"), [(8.0, True), (3.0, False), (0.0, False)])
def test_only_a_division_by_a_power_of_two_becomes_a_product(divisor: float, exact: bool) -> None:
    x = buffer("x", 4)
    (i,) = axes("i", 4)
    found = simplified(Op("div", (load(x, i), f32(divisor))), i, x)
    assert isinstance(found, Op) and found.name == ("mul" if exact else "div")


def test_adding_zero_to_a_float_stays_for_it_changes_negative_zero() -> None:
    x, n = buffer("x", 4), buffer("n", 4, dtype=I64)
    (i,) = axes("i", 4)
    plus_zero = Op("add", (load(x, i), f32(0)))
    assert simplified(plus_zero, i, x) is plus_zero
    assert simplified(Op("add", (load(n, i), Const(0, I64))), i, n) is load(n, i)
    times_zero = Op("mul", (load(x, i), f32(0)))
    assert simplified(times_zero, i, x) is times_zero


@pytest.mark.parametrize(("step", "extent", "known"), [(1, 5, True), (2, 7, True), (2, 6, False)])
def test_a_position_that_is_read_as_an_index_is_itself(step: int, extent: int, known: bool) -> None:
    """Where it is surely in range; elsewhere what is read is checked."""
    x, out = buffer("x", extent), buffer("out", 4)
    (i,) = axes("i", 4)
    place = Op("mul", (position(index(i)), Const(step, I64)))
    read = load(x, index(Runtime(place, index(extent))))
    before = graph((x,), (Def(out, (i,), read),), out)
    (line,) = simplify(before).nodes
    assert isinstance(line, Def)
    (found,) = loads((line.expr,))
    assert (found.indices == (index(i) * step,)) is known


@pytest.mark.parametrize(("number", "known"), [(5.0, True), (1e-46, False)])
def test_a_number_that_its_type_may_round_to_zero_is_no_truth(number: float, known: bool) -> None:
    (m,) = axes("m", 4)
    x, out = buffer("x", 4), buffer("out", 4, dtype=BOOL)
    chosen = Select(Op("lt", (load(x, m), f32(0))), f32(0), f32(number))
    after = simplify(graph((x,), (Def(out, (m,), Cast(chosen, BOOL)),), out))
    assert isinstance(after.defs[0].expr, Cast) is not known


def test_nothing_to_simplify_gives_the_same_graph() -> None:
    x = buffer("x", 4)
    (i,) = axes("i", 4)
    before = out_of(Op("exp", (load(x, i),)), i, x)
    assert simplify(before) is before


def test_a_cast_to_bool_of_a_bool_is_dropped() -> None:
    x = buffer("x", 4, dtype=BOOL)
    (i,) = axes("i", 4)
    assert simplified(Cast(Cast(load(x, i), BOOL), BOOL), i, x) is load(x, i)


@BOUNDED
@given(drawn=random_graphs())
def test_random_graphs_compute_the_same(drawn: Example) -> None:
    check_same(drawn.graph, simplify(drawn.graph), drawn.inputs)


def drawn(compare: str, probability: float) -> Graph:
    """Return ``random number < p``, or ``>= p``, of 64 numbers."""
    seeds, out = buffer("seeds", 1, dtype=I64), buffer("out", 64, dtype=BOOL)
    (i,) = axes("i", 64)
    bits = Op("random", (load(seeds, index(0)), position(index(i))))
    number = Op("mul", (Cast(bits, F32), f32(2.0**-24)))
    return graph((seeds,), (Def(out, (i,), Op(compare, (number, f32(probability)))),), out)


LEAST = float(uniforms(9, range(64)).min())
"""The least number of seed 9: small enough for f32 to tell it from others by less than 2^-24."""


@pytest.mark.parametrize("compare", ["lt", "ge"])
@pytest.mark.parametrize(
    "probability",
    [0.0, 0.1, 0.5, 1.0, -0.5, 1.5, 1e-9, LEAST, LEAST + 2.0**-26, LEAST - 2.0**-26],
)
def test_a_random_number_is_compared_as_an_integer(compare: str, probability: float) -> None:
    before = drawn(compare, probability)
    after = simplify(before)
    check_same(before, after, (np.array([9]),))
    (line,) = after.nodes
    assert isinstance(line, Def)
    assert not any(isinstance(node, Cast) for node in postorder((line.expr,)))


@pytest.mark.parametrize("probability", [float("nan"), float("inf")])
def test_a_random_number_beside_what_is_no_probability_stays(probability: float) -> None:
    before = drawn("ge", probability)
    assert simplify(before) is before


@pytest.mark.parametrize("factor", [2.5, -2.5, float("inf"), float("nan")])
def test_a_mask_times_a_number_keeps_its_value_and_sign(factor: float) -> None:
    x, out = buffer("x", 4), buffer("out", 4)
    (i,) = axes("i", 4)
    mask = Op("gt", (load(x, i), f32(0)))
    product = Op("mul", (Op("round_bf16", (Cast(mask, F32),)), f32(factor)))
    before = graph((x,), (Def(out, (i,), product),), out)
    values = np.array([1, -1, 0, 2], dtype=np.float32)
    after = simplify(before)
    for a, b in zip(run_graph(before, [values]), run_graph(after, [values]), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))
    (line,) = after.nodes
    assert isinstance(line, Def) and isinstance(line.expr, Select) == np.isfinite(factor)
