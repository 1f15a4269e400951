"""The interpreter of graphs, kernels and schedules, against torch and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusec.errors import InternalError
from fusec.ir.dtype import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8, DType
from fusec.ir.expr import Buffer, Cast, Const, Expr, IndexValue, Load, Op, Reduce
from fusec.ir.graph import Def, Extern, Graph, Kernel, Schedule, SizeValue, Store, View
from fusec.ir.index import Axis, Size, index
from fusec.ir.monoid import ALL, ANY, MAX, MIN, PROD, SUM
from fusec.tools.interpreter.expression import Env
from fusec.tools.interpreter.graph import run_graph, run_kernel, to_storage
from fusec.tools.interpreter.scalar import round_to
from tests.ir.graphs import (
    axes,
    below,
    buffer,
    cat,
    eval_expr,
    f32,
    gather,
    graph,
    layer_norm,
    load,
    matmul,
    position,
    ragged_sum,
    softmax,
    total,
    whole,
)

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def bf16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).bfloat16()


def close(seen: np.ndarray, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(seen, expected.float().numpy(), rtol=tolerance, atol=tolerance)


def value_of(expr: Expr, env: Env | None = None) -> np.ndarray:
    return eval_expr(expr, env or Env())


# -- graphs --------------------------------------------------------------------------------------


def test_layer_norm_matches_torch() -> None:
    x, w, b = normal(5, 24), normal(24), normal(24)
    y, rstd = run_graph(layer_norm(5, 24), [x, w, b])
    tensors = [torch.from_numpy(v) for v in (x, w, b)]
    close(y, torch.nn.functional.layer_norm(tensors[0], (24,), tensors[1], tensors[2]))
    assert rstd.shape == (5,)


def test_symbolic_rows_are_given_or_read_from_a_tensor() -> None:
    rows = Size("M", 8)
    x, w, b = normal(3, 16), normal(16), normal(16)
    (y, _) = run_graph(layer_norm(rows, 16), [3, x, w, b])
    assert y.shape == (3, 16)
    with pytest.raises(InternalError, match="size M is both 4 and 3"):
        run_graph(layer_norm(rows, 16), [4, x, w, b])


def test_bf16_rounds_where_the_graph_casts() -> None:
    x, w, b = round_to(BF16)(normal(4, 32)), normal(32), normal(32)
    (y, _) = run_graph(layer_norm(4, 32, dtype=BF16), [x, w, b])
    normalized = torch.nn.functional.layer_norm(
        torch.from_numpy(x), (32,), torch.from_numpy(w), torch.from_numpy(b)
    )
    assert np.array_equal(y, round_to(BF16)(y))
    close(y, normalized.bfloat16(), tolerance=1e-2)


def test_softmax_matches_torch() -> None:
    x = normal(4, 9) * 50
    (y,) = run_graph(softmax(4, 9), [x])
    close(y, torch.softmax(torch.from_numpy(x), 1))


def test_matmul_in_bf16_accumulates_in_f32() -> None:
    a, b = round_to(BF16)(normal(6, 40)), round_to(BF16)(normal(40, 7))
    (out,) = run_graph(matmul(6, 7, 40), [a, b])
    assert np.array_equal(out, round_to(BF16)(a.astype(np.float64) @ b.astype(np.float64)))


def test_concatenation_by_guarded_loads_never_leaves_its_inputs() -> None:
    x, y = normal(3), normal(4)
    (out,) = run_graph(cat(3, 4), [x, y])
    assert np.array_equal(out, np.concatenate([x, y]))


def test_padding_is_zero_where_a_guard_is_false() -> None:
    x, out = buffer("x", 4), buffer("out", 7)
    (i,) = axes("i", 7)
    inside = Op("and", (Op("ge", (position(i), position(2))), below(i, 6)))
    padded = graph((x,), (Def(out, (i,), load(x, index(i) - 2, guard=inside)),), out)
    values = normal(4)
    (seen,) = run_graph(padded, [values])
    assert np.array_equal(seen, np.pad(values, (2, 1)))


def test_gather_reads_rows_by_number() -> None:
    table, ids = normal(10, 3), np.array([7, 0, 7, 9])
    (out,) = run_graph(gather(10, 3, 4), [table, ids])
    assert np.array_equal(out, table[ids])


def test_gather_out_of_range_is_an_error() -> None:
    with pytest.raises(InternalError, match=r"out of range at i=1"):
        run_graph(gather(10, 3, 2), [normal(10, 3), np.array([0, 10])])


@pytest.mark.parametrize("columns", [7, 8, 9])
def test_ragged_reduction_ignores_what_is_beyond_its_limit(columns: int) -> None:
    x = normal(columns)
    (out,) = run_graph(ragged_sum(columns, 4), [x])
    np.testing.assert_allclose(out[0], np.exp(x).sum(), rtol=1e-6)


def test_store_skips_what_is_beyond_a_ragged_limit() -> None:
    x, y = buffer("x", 6), buffer("y", 6)
    o = Axis("o", index(2))
    i = Axis("i", index(4), limit=index(6) - index(o) * 4)
    here = index(o) * 4 + i
    doubled = Op("add", (load(x, here), load(x, here)))
    kernel = Kernel("k", (o,), (i,), (Store(y, (here,), doubled),))
    memory = {x: normal(6)}
    run_kernel(kernel, memory, {})
    assert np.array_equal(memory[y], memory[x] * 2)


def test_reduction_of_a_constant_counts_its_points() -> None:
    c = Axis("c", index(5))
    assert value_of(total(SUM, c, f32(2.0))) == 10
    ragged = Axis("r", index(5), limit=index(3))
    assert value_of(total(SUM, ragged, f32(2.0))) == 6


def test_reduction_over_no_points_is_the_identity() -> None:
    c = Axis("c", index(0))
    body = Cast(position(c), F32)
    assert value_of(total(SUM, c, body)) == 0
    assert value_of(total(MAX, c, body)) == -np.inf
    assert value_of(total(PROD, c, body)) == 1


@pytest.mark.parametrize("monoid", [MAX, MIN, SUM, PROD])
def test_nan_reaches_the_result_of_every_float_reduction(monoid: object) -> None:
    x = buffer("x", 3)
    (c,) = axes("c", 3)
    env = Env()
    to_storage(x, np.array([1.0, np.nan, 2.0]), env)
    assert np.isnan(value_of(Reduce(monoid, (c,), load(x, c)), env))


def test_any_and_all_reduce_bools() -> None:
    (c,) = axes("c", 4)
    assert value_of(total(ANY, c, below(c, 1)))
    assert not value_of(total(ALL, c, below(c, 1)))
    assert value_of(total(ALL, c, below(c, 4)))


def test_inner_reduction_over_the_same_axis_is_a_scope_of_its_own() -> None:
    x = buffer("x", 5)
    (c,) = axes("c", 5)
    env = Env()
    values = to_storage(x, normal(5), env)
    top = total(MAX, c, load(x, c))
    centred = total(SUM, c, Op("exp", (Op("sub", (load(x, c), top)),)))
    np.testing.assert_allclose(value_of(centred, env), np.exp(values - values.max()).sum(), 1e-6)


def test_integers_wrap() -> None:
    big = Const(2**31 - 1, I32)
    assert value_of(Op("add", (big, Const(1, I32)))) == -(2**31)
    (c,) = axes("c", 3)
    assert value_of(total(SUM, c, Const(2**30, I32))) == 3 * 2**30 - 2**32


CASTS = [
    (2.9, F32, I32, 2),
    (-2.9, F32, I32, -2),
    (300, I32, U8, 44),
    (-1, I64, U8, 255),
    (200, I32, I8, -56),
    (-1.5, F32, U8, 255),
    (0.0, F32, BOOL, False),
    (0.25, F32, BOOL, True),
    (-0.0, F64, BOOL, False),
    (1 + 2**-12, F32, F16, 1.0),
    (1 + 2**-8, F32, BF16, 1.0),
    (1 + 3 * 2**-8, F32, BF16, 1 + 2**-6),
    (3.4e38, F64, BF16, np.inf),
    (1e6, F32, F16, np.inf),
]


@pytest.mark.parametrize(("value", "source", "target", "expected"), CASTS)
def test_casts(value: float, source: DType, target: DType, expected: float) -> None:
    assert value_of(Cast(Const(value, source), target)) == expected


def test_bf16_rounding_is_torchs() -> None:
    bits = RNG.integers(0, 2**32, 20000, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), np.float32([np.inf, -np.inf, np.nan, -0.0])])
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(round_to(BF16)(values), expected)
    assert np.signbit(round_to(BF16)(np.float32([-0.0])))[0]


def test_value_has_a_dimension_for_each_free_axis() -> None:
    i, j = axes("i j", 2, 3)
    value = IndexValue(index(j) * 10 + i, I64)
    assert value_of(value).tolist() == [[0, 10, 20], [1, 11, 21]]
    held = Env(points={i: 1})
    assert value_of(value, held).tolist() == [1, 11, 21]


def test_strided_output_is_written_through_its_strides() -> None:
    x = buffer("x", 2, 3)
    turned = Buffer("y", (index(2), index(3)), (index(1), index(2)), F32)
    i, j = axes("i j", 2, 3)
    (seen,) = run_graph(graph((x,), (Def(turned, (i, j), load(x, i, j)),), turned), [X23])
    assert np.array_equal(seen, X23)


X23 = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_output_views_window_the_storage() -> None:
    x = buffer("x", 2, 3)
    column = View(x, (index(2),), (index(3),), index(1))
    turned = View(x, (index(3), index(2)), (index(1), index(3)), index(0))
    outputs = (column, turned, SizeValue(index(4) * 2), None, 1.5)
    seen = run_graph(Graph("g", (x, None), (), outputs), [X23, "nobody reads this"])
    assert np.array_equal(seen[0], X23[:, 1])
    assert np.array_equal(seen[1], X23.T)
    assert seen[2:] == [8, None, 1.5]


def test_view_outside_its_storage_is_an_error() -> None:
    x = buffer("x", 2, 3)
    outside = View(x, (index(2),), (index(6),), index(0))
    with pytest.raises(InternalError, match="outside its storage"):
        run_graph(Graph("g", (x,), (), (outside,)), [X23])


def test_extern_gets_strided_views_and_its_results_are_stored() -> None:
    x, y, z = buffer("x", 2, 3), buffer("y", 3, 2), buffer("z", 3, 2)
    turned = View(x, (index(3), index(2)), (index(1), index(3)), index(0))
    call = Extern("n", "t", (turned, 2, (turned,)), (("alpha", 0.5),), (y, None), "why")
    i, j = axes("i j", 3, 2)
    after = Def(z, (i, j), Op("neg", (load(y, i, j),)))

    def extern(node: Extern, args: tuple, kwargs: dict) -> list:
        assert node is call and args[1] == 2 and kwargs == {"alpha": 0.5}
        assert np.array_equal(args[2][0], X23.T)
        return [args[0] * args[1], None]

    (seen,) = run_graph(graph((x,), (call, after), z), [X23], extern)
    assert np.array_equal(seen, -2 * X23.T)


def test_extern_that_writes_its_argument_changes_the_buffer() -> None:
    x = buffer("x", 2, 3)
    call = Extern("n", "copy_", (whole(x),), (), (), "mutation", impure=True)

    def extern(node: Extern, args: tuple, kwargs: dict) -> list:
        args[0][...] = 7
        return []

    (seen,) = run_graph(graph((x,), (call,), x), [X23], extern)
    assert (seen == 7).all()


def test_unwritten_elements_read_as_nan() -> None:
    y = Buffer("y", (index(2),), (index(3),), F32)
    (i,) = axes("i", 2)
    memory: dict[Buffer, np.ndarray] = {}
    run_kernel(Kernel("k", (i,), (), (Store(y, (index(i),), f32(1)),)), memory, {})
    np.testing.assert_array_equal(memory[y], np.float32([1, np.nan, np.nan, 1]))


# -- kernels and schedules -----------------------------------------------------------------------


def row_kernel() -> tuple[Kernel, Buffer, Buffer, Buffer]:
    """xr = x + 1 and its row sums, one kernel with two stores."""
    x, xr, rows = buffer("x", 2, 3), buffer("xr", 2, 3), buffer("rows", 2)
    m, c = axes("m c", 2, 3)
    more = Op("add", (load(x, m, c), f32(1)))
    stores = (Store(xr, (index(m), index(c)), more), Store(rows, (index(m),), total(SUM, c, more)))
    return Kernel("k0", (m,), (c,), stores), x, xr, rows


def test_kernel_stores_everything_it_holds() -> None:
    kernel, x, xr, rows = row_kernel()
    memory = {x: X23.reshape(-1)}
    run_kernel(kernel, memory, {})
    assert np.array_equal(memory[xr].reshape(2, 3), X23 + 1)
    assert memory[rows].tolist() == [6, 15]


def test_schedule_runs_its_kernels_in_order() -> None:
    kernel, x, _, rows = row_kernel()
    (m,) = axes("m", 2)
    out = buffer("out", 2)
    last = Kernel("k1", (m,), (), (Store(out, (index(m),), Op("neg", (load(rows, m),))),))
    schedule = Schedule(graph((x,), (), out), (kernel, last))
    (seen,) = run_graph(schedule, [X23])
    assert seen.tolist() == [-6, -15]


def test_two_points_that_store_to_one_element_are_an_error() -> None:
    y = buffer("y", 2)
    i, j = axes("i j", 2, 3)
    store = Store(y, (index(i),), Cast(position(j), F32))
    with pytest.raises(InternalError, match="two points store to one element of y"):
        run_kernel(Kernel("k", (i,), (j,), (store,)), {}, {})


def test_kernel_may_update_in_place_and_read_nothing_else_that_it_writes() -> None:
    y = buffer("y", 4)
    (i,) = axes("i", 4)
    memory = {y: np.float32([1, 2, 3, 4])}
    same = Store(y, (index(i),), Op("neg", (load(y, i),)))
    run_kernel(Kernel("k", (i,), (), (same,)), memory, {})
    assert memory[y].tolist() == [-1, -2, -3, -4]
    other = Store(y, (index(i),), load(y, index(3) - i))
    with pytest.raises(InternalError, match="at another index"):
        run_kernel(Kernel("k", (i,), (), (other,)), memory, {})


def test_unguarded_load_out_of_range_names_the_point() -> None:
    x, y = buffer("x", 3), buffer("y", 4)
    (i,) = axes("i", 4)
    wrong = graph((x,), (Def(y, (i,), load(x, i)),), y)
    with pytest.raises(InternalError, match=r"x\[i\] is out of range at i=3"):
        run_graph(wrong, [normal(3)])


def test_load_of_a_buffer_that_is_nowhere_is_an_error() -> None:
    with pytest.raises(InternalError, match="not in memory"):
        value_of(Load(buffer("x", 1), (index(0),)))
