"""Expressions: interning, guards, substitution, and depth."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator

import pytest

from fusec.errors import InternalError, InvalidIR
from fusec.ir import intern
from fusec.ir.definition import Def
from fusec.ir.dtype import BOOL, F32, I32, I64
from fusec.ir.expr import (
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Reduce,
    Select,
    both,
    cast,
    children,
    in_range,
    loads,
    op,
    postorder,
    select,
)
from fusec.ir.index import Axis, Runtime, Size, index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.rewrite import Normalizer, Rules, inline_loads, rewrite, with_guard
from fusec.ir.text import print_expr, print_lines
from fusec.ir.verify import verify_expr
from fusec.tools.interpreter.expression import Env
from fusec.tools.interpreter.graph import to_storage
from tests.ir.graphs import axes, below, buffer, eval_expr, f32, load, position, total

X = buffer("x", 4)
XY = buffer("xy", 4, 4)
A, B = axes("a b", 4, 4)


# -- interning -----------------------------------------------------------------------------------


def test_equal_expressions_are_one_object() -> None:
    assert load(X, A) is load(X, A)
    assert Load(X, (index(A),)) is Load(X, (index(A),), None)
    assert IndexValue(index(A)) is IndexValue(index(A), I64)
    assert Op("add", (load(X, A), f32(1))) is Op("add", (load(X, A), f32(1)))
    assert load(X, A) is not load(X, B)


def test_arithmetic_builds_operations_and_takes_numbers_of_the_same_type() -> None:
    a, b = load(X, A), load(X, B)
    below = op("lt", a, 2)
    assert below is Op("lt", (a, f32(2)))
    assert a + b is Op("add", (a, b)) and a - 1.5 is Op("sub", (a, f32(1.5)))
    assert 1 - a is Op("sub", (f32(1), a)) and -(a / b) is Op("neg", (Op("div", (a, b)),))
    assert below & op("gt", a, b) is Op("and", (below, Op("gt", (a, b))))
    assert below | below is Op("or", (below, below))
    assert select(below, 0, a) is Select(below, f32(0), a)
    assert select(below, a, math.inf) is Select(below, a, f32(math.inf))


def test_a_factor_of_one_is_left_out_and_only_that() -> None:
    a = load(X, A)
    assert a * 1 is a and f32(1) * a is a
    assert a * 2 is Op("mul", (a, f32(2))) and op("mul", a, 1) is Op("mul", (a, f32(1)))


def test_constants_that_differ_in_any_bit_or_type_are_kept_apart() -> None:
    assert f32(0.0) is not f32(-0.0)
    assert math.copysign(1, f32(-0.0).value) == -1
    assert f32(math.nan) is f32(math.nan)
    assert math.isnan(f32(math.nan).value)
    assert Const(1, I64) is not Const(True, BOOL)
    assert Const(1, I64) is not Const(1, I32)
    assert Const(1, F32) is Const(1.0, F32)
    assert f32(math.inf) is not f32(-math.inf)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nodes are in no cycles, so they go with their last reader, and others' garbage stays."""
    gc.disable()
    yield
    gc.enable()


def test_nodes_that_nobody_uses_are_forgotten(no_collector: None) -> None:
    kept = {Op("add", (load(X, A), f32(1000 + i))) for i in range(100)}
    rows = [row for row, node in list(intern._table.items()) if node() in kept]
    assert len(rows) == 100
    kept.clear()
    assert not any(row in intern._table for row in rows)


def test_threads_that_build_the_same_nodes_get_the_same_objects() -> None:
    built: list[list[Expr]] = [[] for _ in range(4)]
    start = threading.Barrier(len(built))

    def build(into: list[Expr]) -> None:
        start.wait()
        for i in range(300):
            into.append(Op("mul", (load(X, index(A) % 3), f32(5000 + i))))

    threads = [threading.Thread(target=build, args=(into,)) for into in built]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for same in zip(*built, strict=True):
        assert len(set(map(id, same))) == 1


# -- depth ---------------------------------------------------------------------------------------


def chain(depth: int) -> Expr:
    """x[a] + 1 + 1 + ..., in nodes ``depth`` deep."""
    expr: Expr = load(X, A)
    for _ in range(depth):
        expr = Op("add", (expr, f32(1)))
    return expr


def test_chain_of_5000_nodes_is_walked_without_recursion() -> None:
    deep = chain(5000)
    assert len(postorder((deep,))) == 5002
    moved = deep.substitute({A: index(B)})
    assert moved.axes == {B}
    (negated,) = rewrite((deep,), lambda n: Op("neg", (n,)) if isinstance(n, Load) else n)
    assert len(postorder((negated,))) == 5003
    verify_expr(deep, frozenset((A,)), "y[a] = ...")
    env = Env()
    to_storage(X, [0, 1, 2, 3], env)  # type: ignore[arg-type]
    assert eval_expr(deep, env).tolist() == [5000, 5001, 5002, 5003]
    assert len(print_expr(deep)) < 20_000


def test_chain_of_30000_nodes_is_released_without_recursion(no_collector: None) -> None:
    before = len(intern._table)
    deep = chain(30_000)
    assert len(intern._table) > before + 29_000
    del deep
    assert len(intern._table) <= before + 2


def test_shared_nodes_are_visited_once() -> None:
    expr: Expr = load(X, A)
    for _ in range(200):
        expr = Op("mul", (expr, expr))
    assert len(postorder((expr,))) == 201
    assert len(print_expr(expr)) < 50_000
    assert len(print_lines({"y": expr})) == 200
    verify_expr(expr, frozenset((A,)), "y[a] = ...")
    assert expr.substitute({A: index(B)}).axes == {B}


# -- construction --------------------------------------------------------------------------------


def test_ill_formed_nodes_are_refused() -> None:
    with pytest.raises(InvalidIR, match="indexed by"):
        Load(X, (index(A), index(B)))
    with pytest.raises(InvalidIR, match="no scalar operation"):
        Op("frobnicate", (f32(1),))
    with pytest.raises(InvalidIR, match="of 1 arguments"):
        Op("add", (f32(1),))
    with pytest.raises(InvalidIR, match="arguments of types"):
        Op("add", (f32(1), Const(1, I32)))
    with pytest.raises(InvalidIR, match="where"):
        Select(f32(1), f32(1), f32(1))


def test_free_axes_follow_loads_guards_gathers_and_reductions() -> None:
    guarded = load(X, 0, guard=below(B, 2))
    assert guarded.axes == {B}
    gathered = load(X, Runtime(Cast(load(X, A), I64), index(4)))
    assert gathered.axes == {A}
    assert total(SUM, A, Op("add", (load(X, A), load(X, B)))).axes == {B}
    assert children(gathered) == (Cast(load(X, A), I64),)


def test_cast_to_the_same_type_is_the_argument() -> None:
    assert cast(load(X, A), F32) is load(X, A)
    assert cast(position(A), I32) is position(A, I32)
    assert cast(Const(2, I64), F32) is f32(2)
    assert isinstance(cast(f32(2.5), I32), Cast)
    assert cast(Const(2**31 - 1, I64), I32) is Const(2**31 - 1, I32)
    assert isinstance(cast(Const(2**31, I64), I32), Cast)


def test_in_range_keeps_only_what_is_not_provable() -> None:
    assert in_range(index(A), 0, 4) is None
    assert in_range(index(A) - 1, 0, 4) is Op("ge", (position(index(A) - 1), position(0)))
    assert in_range(index(A) + 1, 0, 4) is Op("lt", (position(index(A) + 1), position(4)))
    shifted = in_range(index(A) * 3 - 2, 0, 4)
    assert isinstance(shifted, Op) and shifted.name == "and"


def test_both_is_a_conjunction_where_none_is_true() -> None:
    a, b = below(A, 2), below(B, 2)
    assert both(None, a) is a and both(a, None) is a and both(a, a) is a
    assert both(None, None) is None
    assert both(a, b) is Op("and", (a, b))


def test_flat_buffer_is_one_object_whose_base_is_the_tensor() -> None:
    flat = XY.flat()
    assert flat is XY.flat() is flat.flat()
    assert flat.base is XY
    assert flat.shape == (index(16),)
    assert XY.offset((index(A), index(B))) is index(A) * 4 + B


# -- substitution and rewriting --------------------------------------------------------------------


def test_substitution_of_nothing_is_the_same_object() -> None:
    expr = total(SUM, B, load(XY, A, B))
    assert expr.substitute({}) is expr
    assert expr.substitute({Axis("other", index(4)): index(0)}) is expr


def test_substitution_reaches_gathers_guards_and_bound_axes() -> None:
    k, ko, ki = axes("k ko ki", 4, 2, 2)
    gathered = load(X, Runtime(Cast(load(X, A), I64), index(4)), guard=below(A, 2))
    expected = load(X, Runtime(Cast(load(X, k), I64), index(4)), guard=below(k, 2))
    assert gathered.substitute({A: index(k)}) is expected
    summed = total(SUM, B, load(XY, A, B))
    halves = summed.substitute({B: index(ko) * 2 + ki})
    assert isinstance(halves, Reduce) and halves.over == (ko, ki)


def test_axes_merged_into_one_are_bound_once() -> None:
    n = Axis("n", index(16))
    summed = Reduce(SUM, (A, B), load(XY, A, B))
    merged = summed.substitute({A: index(n) // 4, B: index(n) % 4})
    assert isinstance(merged, Reduce) and merged.over == (n,)


def test_reduction_over_an_axis_of_one_point_is_its_body() -> None:
    one = Axis("one", index(1))
    assert total(MAX, one, load(XY, A, one)).substitute({one: index(0)}) is load(XY, A, 0)


def test_substitution_that_would_capture_an_axis_is_refused() -> None:
    with pytest.raises(InternalError, match="would bind"):
        total(SUM, B, load(XY, A, B)).substitute({A: index(B)})


def test_inlined_definition_is_guarded_like_its_load() -> None:
    (k,) = axes("k", 4)
    y, z = buffer("y", 4), buffer("z", 4)
    definition = {y: Def(y, (A,), Op("exp", (load(X, A),)))}
    guard, same = below(k, 3), Normalizer(Rules())
    guarded = Def(z, (k,), load(y, index(k) + 1, guard=guard))
    body = Op("exp", (load(X, index(k) + 1, guard=guard),))
    assert inline_loads(guarded, definition, same).expr is Select(guard, body, f32(0))
    plain = Def(z, (k,), load(y, k))
    assert inline_loads(plain, definition, same).expr is Op("exp", (load(X, k),))


def test_guarded_condition_is_a_conjunction() -> None:
    guard = below(A, 2)
    condition = Op("lt", (load(X, A), f32(0)))
    expected = Op("lt", (load(X, A, guard=guard), f32(0)))
    assert with_guard(condition, guard) is Op("and", (guard, expected))
    assert with_guard(condition, None) is condition


def test_rewriting_nothing_returns_the_same_objects() -> None:
    roots = (total(SUM, B, load(XY, A, B)), load(X, A))
    assert rewrite(roots, lambda node: node) == roots
    assert loads(roots) == [load(XY, A, B), load(X, A)]


def test_printed_form() -> None:
    size = Size("N", 4)
    expr = Select(below(A, size), total(SUM, B, load(XY, A, B)), f32(-0.0))
    assert print_expr(expr) == "where((a):i64 < (N):i64, sum(b: xy[a, b]), -0.0)"
    assert repr(load(X, A, guard=below(A, 2))) == "x[a] if ((a):i64 < (2):i64)"
