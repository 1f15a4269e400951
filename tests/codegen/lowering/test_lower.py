"""Lowering: the program of a kernel under many plans computes what the kernel does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from fusec.codegen.cpp.transposed import transposed_block
from fusec.codegen.lowering.lower import lower
from fusec.errors import InternalError
from fusec.ir.dtype import F32, F64, I32
from fusec.ir.expr import Buffer, Cast, Const, Expr, IndexValue, Load, Op, Reduce, Select, Var
from fusec.ir.graph import Kernel, Store
from fusec.ir.index import Axis, Size, index
from fusec.ir.monoid import ARGMAX, ARGMIN, MAX, PROD, SUM, Monoid
from fusec.ir.program import Carry, For, Let, Program, Statement, statements
from fusec.ir.verify_program import verify_program
from fusec.passes.kernel.coalesce import flatten
from fusec.passes.schedule.plan import Binding, LoopKind, Plan
from fusec.tools.interpreter.expression import Env
from fusec.tools.interpreter.graph import run_kernel, to_storage
from fusec.tools.interpreter.program import run_program
from tests.ir.graphs import axes, below, buffer, f32, load

ROWS = 3
EXTENTS = (1, 7, 15, 16, 17, 33, 100)


def check_plan(
    kernel: Kernel, plan: Plan, sizes: dict[Size, int] | None = None, *, close: bool = False
) -> None:
    """Assert that the kernel, lowered under a plan, stores exactly what its interpreter does.

    Args:
        close: or nearly, where exponentials are rounded.
    """
    flat = flatten(kernel)
    program = lower(flat, plan)
    verify_program(program)
    expected, found = storage(flat, sizes or {}), storage(flat, sizes or {})
    run_kernel(flat, expected, sizes or {})
    run_program(program, found, sizes or {})
    for store in flat.stores:
        a, b = expected[store.buffer.base], found[store.buffer.base]
        same = np.allclose if close else np.array_equal
        assert same(a, b, equal_nan=True), (store.buffer, a, b)


def cpu(bindings: tuple[Binding, ...], *, peel: bool = True) -> Plan:
    """Return a plan in which values are kept from one loop to the next."""
    return Plan(bindings, peel=peel, kept_cost=5, kept_bytes=1 << 19)


def storage(kernel: Kernel, sizes: dict[Size, int]) -> dict[Buffer, np.ndarray]:
    """Return storage of small integers for everything a kernel reads."""
    env = Env(sizes=sizes)
    numbers = np.random.default_rng(1)
    program = lower(kernel, Plan(tuple(Binding(a, LoopKind.LOOP) for a in kernel.axes)))
    for read in program.reads:
        shape = tuple(
            sum(c * np.prod([sizes[s] for s in m], dtype=int) for m, c in n.terms) + n.const  # type: ignore[index]
            for n in read.shape
        )
        to_storage(read, numbers.integers(-4, 5, shape), env)
    return env.storage


def row_sums(extent: int | Size) -> tuple[Kernel, Axis, Axis]:
    """y[m, c] = x[m, c] - sum(c: x), s[m] = that sum, t[c] = w[c] + 1: three kinds of stores."""
    x, y = buffer("x", ROWS, extent), buffer("y", ROWS, extent)
    s = buffer("s", ROWS)
    m, c = axes("m c", ROWS, extent)
    value = load(x, m, c)
    total = Reduce(SUM, (c,), value)
    stores = (
        Store(y, (index(m), index(c)), Op("sub", (value, total))),
        Store(s, (index(m),), total),
    )
    return Kernel("k", (m,), (c,), stores), m, c


LANE_PLANS = [
    (LoopKind.LOOP, 1, 0),
    (LoopKind.LOOP, 4, 0),
    (LoopKind.LOOP, 16, 0),
    (LoopKind.LANES, 128, 0),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("peel", [True, False])
@pytest.mark.parametrize("extent", EXTENTS)
def test_row_kernel_under_every_plan(extent: int, peel: bool) -> None:
    kernel, m, c = row_sums(extent)
    for (place, tile, _), rows in itertools.product(LANE_PLANS, (1, 2)):
        if place is LoopKind.LANES and rows == 1 and extent == 1:
            continue
        bindings = (Binding(m, LoopKind.GRID, rows), Binding(c, place, tile))
        plan = cpu(bindings) if peel else Plan(bindings)
        check_plan(kernel, plan)


@pytest.mark.parametrize("extent", EXTENTS)
def test_pointwise_kernel_in_chunks_of_lanes(extent: int) -> None:
    x, y = buffer("x", ROWS, extent), buffer("y", ROWS, extent)
    m, c = axes("m c", ROWS, extent)
    value = Op("mul", (load(x, m, c), f32(2)))
    kernel = Kernel("k", (m, c), (), (Store(y, (index(m), index(c)), value),))
    for tile, chunk in itertools.product((1, 4, 16), (0, 1, 2, 3)):
        check_plan(kernel, cpu((Binding(m, LoopKind.GRID), Binding(c, LoopKind.GRID, tile, chunk))))


def transposed(rows: int | Size, columns: int | Size, tile: int) -> tuple[Kernel, Plan]:
    """y[m, c] = x[c, m] + (w[c, m] if c >= 2) * x[m, c], in blocks of tile x tile."""
    x, w, y = buffer("x", columns, rows), buffer("w", columns, rows), buffer("y", rows, columns)
    z = buffer("z", rows, columns)
    m, c = axes("m c", rows, columns)
    part = Load(w, (index(c), index(m)), Op("ge", (IndexValue(index(c), I32), Const(2, I32))))
    value = Op("add", (load(x, c, m), Op("mul", (part, load(z, m, c)))))
    kernel = Kernel("k", (m, c), (), (Store(y, (index(m), index(c)), value),))
    blocks = Binding(m, LoopKind.GRID, 1, tile, transposed=True)
    return kernel, cpu((Binding(c, LoopKind.LOOP, tile), blocks))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("extent", EXTENTS)
def test_blocks_of_loads_along_another_axis_are_turned(extent: int) -> None:
    for other, tile in itertools.product((3, 16, 21), (4, 16)):
        kernel, plan = transposed(other, extent, tile)
        check_plan(kernel, plan)
        program = lower(flatten(kernel), plan)
        blocks = [transposed_block(loop, program.lanes[0]) for loop in loops(program.body)]
        full, rest = extent >= tile, extent % tile > 0  # in the rest w has a guard for each row
        assert sum(block is not None for block in blocks) == 2 * full + rest


@pytest.mark.sampled(5)
@pytest.mark.parametrize("extent", EXTENTS[1:])
def test_what_a_reduction_reads_is_turned_and_what_is_kept_is_not_read_again(extent: int) -> None:
    x, y = buffer("x", 21, extent), buffer("y", extent, 21)
    p, c = axes("p c", 21, extent)
    value = Op("exp", (Op("sub", (load(x, p, c), Reduce(MAX, (c,), load(x, p, c)))),))
    share = Op("div", (value, Reduce(SUM, (c,), value)))
    kernel = Kernel("k", (p,), (c,), (Store(y, (index(c), index(p)), share),))
    for tile in (4, 16):
        blocks = Binding(c, LoopKind.LOOP, 1, tile, transposed=True)
        program = lower(flatten(kernel), cpu((Binding(p, LoopKind.GRID, tile, 2), blocks)))
        transposed = [transposed_block(loop, program.lanes[0]) for loop in loops(program.body)]
        assert (
            sum(block is not None for block in transposed) == 4
        )  # twice, in full tiles and the rest
        expected, found = storage(flatten(kernel), {}), storage(flatten(kernel), {})
        run_kernel(flatten(kernel), expected, {})
        run_program(program, found, {})
        np.testing.assert_allclose(found[y.base], expected[y.base], rtol=1e-6)


@pytest.mark.parametrize("actual", [2, 5, 16, 17, 40])
def test_blocks_of_symbolic_extents_are_turned(actual: int) -> None:
    rows, columns = Size("r", 32), Size("n", 32)
    kernel, plan = transposed(rows, columns, 4)
    check_plan(kernel, plan, {rows: actual, columns: 42 - actual})


def loops(body: tuple[Statement, ...]) -> list[For]:
    """Return the loops of a program, those inside loops included."""
    found = [s for s in body if isinstance(s, For)]
    return found + [inner for loop in found for inner in loops(loop.body)]


@pytest.mark.parametrize("actual", [1, 5, 16, 17, 40])
def test_symbolic_extents_are_ragged_unless_proven_otherwise(actual: int) -> None:
    size = Size("n", 32)
    kernel, m, c = row_sums(size)
    for tile, peel in itertools.product((1, 4, 16), (True, False)):
        plan = cpu((Binding(m, LoopKind.GRID), Binding(c, LoopKind.LOOP, tile)), peel=peel)
        check_plan(kernel, plan, {size: actual})


@pytest.mark.parametrize("extent", EXTENTS)
def test_column_sum_beside_row_sum_accumulates_in_an_array(extent: int) -> None:
    x, rows, columns = buffer("x", 5, extent), buffer("r", 5), buffer("q", extent)
    m, c = axes("m c", 5, extent)
    value = load(x, m, c)
    stores = (
        Store(rows, (index(m),), Reduce(SUM, (c,), value)),
        Store(columns, (index(c),), Reduce(MAX, (m,), value)),
    )
    kernel = Kernel("k", (), (m, c), stores)
    for tile in (1, 4, 16):
        check_plan(kernel, cpu((Binding(m, LoopKind.LOOP), Binding(c, LoopKind.LOOP, tile))))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("extent", EXTENTS)
def test_an_argmax_runs_in_one_sweep_with_the_maximum(extent: int) -> None:
    x, best, place, column = (buffer("x", 5, extent), *map(buffer, "vpq", (5, 5, extent)))
    m, c = axes("m c", 5, extent)
    value = load(x, m, c)
    rows = (
        Store(best, (index(m),), Reduce(MAX, (c,), value)),
        Store(place, (index(m),), as_f32(Reduce(ARGMAX, (c,), value, position(c)))),
    )
    kernel = Kernel("k", (m,), (c,), rows)
    for tile in (1, 4, 16):
        plan = Plan((Binding(m, LoopKind.GRID), Binding(c, LoopKind.LOOP, tile)))
        check_plan(kernel, plan)
        assert len(loops(lower(flatten(kernel), plan).body)) == 1
    check_plan(kernel, Plan((Binding(m, LoopKind.GRID, 2), Binding(c, LoopKind.LANES, 128))))
    columns = Store(column, (index(c),), as_f32(Reduce(ARGMIN, (m,), value, position(m))))
    both = Kernel("k", (), (m, c), (rows[1], columns))  # in private arrays
    for tile in (1, 4, 16):
        check_plan(both, Plan((Binding(m, LoopKind.LOOP), Binding(c, LoopKind.LOOP, tile))))


@pytest.mark.sampled(3)  # a diagonal
@pytest.mark.parametrize("monoid", [SUM, MAX, PROD, ARGMAX], ids=str)
@pytest.mark.parametrize("extent", EXTENTS)
def test_a_tile_in_rows_is_folded_before_it_is_carried(extent: int, monoid: Monoid) -> None:
    x, y = buffer("x", 5, extent), buffer("y", 5)
    m, c = axes("m c", 5, extent)
    value = load(x, m, c)
    bodies = (value, position(c)) if monoid is ARGMAX else (value,)
    found = Reduce(monoid, (c,), *bodies)
    kernel = Kernel("k", (m,), (c,), (Store(y, (index(m),), as_f32(found)),))
    for fold in (2, 4):
        plan = Plan((Binding(m, LoopKind.GRID), Binding(c, LoopKind.LOOP, 16, fold=fold)))
        check_plan(kernel, plan)
        carried = 16 if monoid is ARGMAX else 16 // fold  # of a pair, both in every lane
        carries = [s.var for s in lower(flatten(kernel), plan).body if isinstance(s, Carry)]
        assert {lanes_of(carry) for carry in carries} == {carried}


def lanes_of(var: Var) -> int:
    return math.prod(axis.extent.const for axis in var.axes)


@pytest.mark.sampled(4)  # a diagonal
@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("hidden", (0, 3, 100))
def test_sums_beside_a_maximum_of_their_lane_refer_to_the_row_s(extent: int, hidden: int) -> None:
    """A lane may have seen nothing but -inf, and a row as well: exp(-inf - -inf) is NaN there."""
    x, total, y = buffer("x", 5, extent), buffer("l", 5), buffer("y", 5, extent)
    m, c = axes("m c", 5, extent)
    score = Select(below(index(hidden), index(c) + 1), load(x, m, c), f32(-math.inf))
    top = Reduce(MAX, (c,), score)
    weight = Op("exp", (Op("sub", (score, top)),))
    rows = Reduce(SUM, (c,), weight)
    stores = (Store(total, (index(m),), rows), Store(y, (index(m), index(c)), weight))
    kernel = Kernel("k", (m,), (c,), stores)
    for fold in (1, 2, 4):
        tiles = Binding(c, LoopKind.LOOP, 16, fold=fold)
        plan = Plan((Binding(m, LoopKind.GRID), tiles), online=True)
        program = lower(flatten(kernel), plan)
        assert [type(s) for s in program.body].count(For) == 2  # one for both, one that stores
        check_plan(kernel, plan, close=True)


def as_f32(place: Expr) -> Expr:
    return Cast(place, F32)


def position(axis: Axis) -> Expr:
    return IndexValue(index(axis), I32)


def dear_rows(extent: int, term: Callable[[Expr], Expr]) -> Kernel:
    """Return a kernel for ``d[m, c] - sum(c: term(d))`` with eight operations in ``d``."""
    x, y = buffer("x", 2, extent), buffer("y", 2, extent)
    m, c = axes("m c", 2, extent)
    dear: Expr = load(x, m, c)
    for _ in range(4):
        dear = Op("mul", (Op("add", (dear, f32(1))), f32(2)))
    value = Op("sub", (dear, Reduce(SUM, (c,), term(dear))))
    return Kernel("k", (m,), (c,), (Store(y, (index(m), index(c)), value),))


def by_rows(kernel: Kernel) -> Plan:
    return cpu(
        (Binding(kernel.grid[0], LoopKind.GRID), Binding(kernel.inside[0], LoopKind.LOOP, 16))
    )


@pytest.mark.parametrize("extent", EXTENTS)
def test_dear_value_is_kept_between_sweeps(extent: int) -> None:
    kernel = dear_rows(extent, lambda dear: dear)
    check_plan(kernel, by_rows(kernel))
    assert "scratch" in repr_program(kernel, by_rows(kernel))


def test_what_only_a_finished_sum_needs_is_not_kept() -> None:
    kernel = dear_rows(32, lambda dear: Op("mul", (dear, dear)))
    check_plan(kernel, by_rows(kernel))
    text = repr_program(kernel, by_rows(kernel))
    assert text.count("* 2.0") == 4, "the second sweep reads d, which stands below its square"


def test_what_a_kept_value_is_computed_from_is_not_kept_again() -> None:
    x, y = buffer("x", 2, 32), buffer("y", 2, 32)
    m, c = axes("m c", 2, 32)
    dear: Expr = load(x, m, c)
    for _ in range(4):
        dear = Op("mul", (Op("add", (dear, f32(1))), f32(2)))
    off = Op("sub", (dear, Reduce(SUM, (c,), dear)))
    value = Op("mul", (dear, Reduce(SUM, (c,), Op("mul", (off, off)))))
    kernel = Kernel("k", (m,), (c,), (Store(y, (index(m), index(c)), value),))
    check_plan(kernel, by_rows(kernel))
    text = repr_program(kernel, by_rows(kernel))
    assert text.count("scratch") == 1
    assert text.count("* 2.0") == 4, "two sweeps read what the first has kept"


def test_what_the_loop_over_blocks_keeps_no_loop_in_a_block_keeps_again() -> None:
    """The end of the last block is known where its number is: a loop in it is no outermost one."""
    x, y = buffer("x", 2, 255), buffer("y", 2, 13)
    m, j, c = axes("m j c", 2, 13, 255)
    dear: Expr = load(x, m, c)
    for _ in range(4):
        dear = Op("mul", (Op("add", (dear, f32(1))), f32(2)))
    above = Op("le", (position(j), position(c)))
    term = Select(above, Cast(dear, F64), Const(0.0, F64))
    total = Cast(Reduce(SUM, (c,), term), F32)
    kernel = Kernel("k", (m,), (j, c), (Store(y, (index(m), index(j)), total),))
    loops = (Binding(m, LoopKind.GRID), Binding(j, LoopKind.LOOP))
    plan = cpu((*loops, Binding(c, LoopKind.LOOP, chunk=64)))
    check_plan(kernel, plan)
    assert repr_program(kernel, plan).count("scratch") == 1


def repr_program(kernel: Kernel, plan: Plan) -> str:
    from fusec.ir.program import print_program  # local: the one test that reads a program

    return print_program(lower(flatten(kernel), plan))


@pytest.mark.parametrize("monoid", [SUM, PROD, MAX])
def test_reduction_folds_a_value_that_is_the_same_in_all_lanes(monoid: Monoid) -> None:
    # With lanes of 16, c < 16 is decided a tile at a time: the body of the sum has no lanes left.
    y = buffer("y", 2)
    m, c = axes("m c", 2, 16)
    body = Select(below(c, 16), f32(2), f32(3))
    kernel = Kernel("k", (m,), (c,), (Store(y, (index(m),), Reduce(monoid, (c,), body)),))
    check_plan(kernel, cpu((Binding(m, LoopKind.GRID), Binding(c, LoopKind.LANES, 16))))
    check_plan(kernel, cpu((Binding(m, LoopKind.GRID), Binding(c, LoopKind.LOOP, 4))))


def test_load_that_varies_along_lanes_alone_stays_under_their_mask() -> None:
    # (c + 1) % 2 with c = co*4 + ci does not mention the loop, and may not leave it.
    x, y = buffer("x", 2), buffer("y", 3)
    (c,) = axes("c", 3)
    value = load(x, (index(c) + 1) % 2)
    kernel = Kernel("k", (), (c,), (Store(y, (index(c),), value),))
    check_plan(kernel, cpu((Binding(c, LoopKind.LOOP, 4),)))


@pytest.mark.parametrize("tile", [1, 4, 8, 16])
def test_ragged_axis_shorter_than_its_tile_ends_at_its_extent(tile: int) -> None:
    # 7 rows in parts of 3: lanes 3..tile of each part belong to the next one.
    x, y = buffer("x", 7), buffer("y", 3)
    (p,) = axes("p", 3)
    i = Axis("i", index(3), limit=index(7) - index(p) * 3)
    total = Reduce(SUM, (i,), load(x, index(p) * 3 + i))
    kernel = Kernel("k", (p,), (i,), (Store(y, (index(p),), total),))
    for place in (LoopKind.LOOP, LoopKind.LANES)[: 2 if tile > 2 else 1]:
        check_plan(kernel, cpu((Binding(p, LoopKind.GRID), Binding(i, place, tile)), peel=False))


def test_two_nested_reductions_over_different_axes() -> None:
    x, y = buffer("x", 3, 5, 7), buffer("y", 3)
    m, a, c = axes("m a c", 3, 5, 7)
    inner = Reduce(SUM, (c,), load(x, m, a, c))
    outer = Reduce(MAX, (a,), Op("mul", (inner, inner)))
    kernel = Kernel("k", (m,), (a, c), (Store(y, (index(m),), outer),))
    for tile in (1, 4):
        bindings = (
            Binding(m, LoopKind.GRID),
            Binding(a, LoopKind.LOOP),
            Binding(c, LoopKind.LOOP, tile),
        )
        check_plan(kernel, cpu(bindings))


def test_plan_that_binds_loops_in_an_impossible_order_is_an_internal_error() -> None:
    x, y = buffer("x", 3, 5), buffer("y", 3)
    m, c = axes("m c", 3, 5)
    kernel = Kernel("k", (m,), (c,), (Store(y, (index(m),), Reduce(SUM, (c,), load(x, m, c))),))
    plan = Plan((Binding(c, LoopKind.LOOP, 4), Binding(m, LoopKind.LOOP)))
    with pytest.raises(InternalError):
        check_plan(kernel, plan)


def test_ragged_axis_in_lanes_beside_its_outer_axis_in_lanes() -> None:
    # The end of i depends on p, and p is cut: the mask is stated over the parts of p.
    x, y = buffer("x", 7), buffer("y", 3)
    (p,) = axes("p", 3)
    i = Axis("i", index(3), limit=index(7) - index(p) * 3)
    total = Reduce(SUM, (i,), load(x, index(p) * 3 + i))
    kernel = Kernel("k", (p,), (i,), (Store(y, (index(p),), total),))
    check_plan(
        kernel, cpu((Binding(p, LoopKind.GRID, 2), Binding(i, LoopKind.LANES, 4)), peel=False)
    )


def test_array_kept_inside_a_loop_is_not_used_after_it() -> None:
    # Both sweeps over a compute d(a, c); the first keeps it row by row, in an array of the row.
    x, y = buffer("x", 3, 5), buffer("y", 3, 5)
    a, c = axes("a c", 3, 5)
    dear: Expr = load(x, a, c)
    for _ in range(4):
        dear = Op("mul", (Op("add", (dear, f32(1))), f32(2)))
    row = Reduce(MAX, (c,), Op("sub", (dear, Reduce(MAX, (c,), dear))))
    value = Op("sub", (dear, Reduce(SUM, (a,), row)))
    kernel = Kernel("k", (), (a, c), (Store(y, (index(a), index(c)), value),))
    for tile in (1, 4):
        check_plan(kernel, cpu((Binding(a, LoopKind.LOOP), Binding(c, LoopKind.LOOP, tile))))


@pytest.mark.parametrize("extent", EXTENTS)
def test_expensive_value_of_an_inner_loop_is_computed_before_the_outer(extent: int) -> None:
    # exp(w[c]) is in an array when the loop over a begins; -w[c] is computed in each iteration.
    x, w, y = buffer("x", 3, extent), buffer("w", extent), buffer("y", 3, extent)
    a, c = axes("a c", 3, extent)
    dear, cheap = (Op(name, (load(w, c),)) for name in ("exp", "neg"))
    value = Op("add", (Op("mul", (load(x, a, c), dear)), cheap))
    kernel = Kernel("k", (), (a, c), (Store(y, (index(a), index(c)), value),))
    for tile in (1, 4):
        plan = cpu((Binding(a, LoopKind.LOOP), Binding(c, LoopKind.LOOP, tile)))
        check_plan(kernel, plan, close=True)
        before, outer = operations(lower(flatten(kernel), plan), a)
        assert "exp" in before and "neg" not in before
        assert "exp" not in outer and "neg" in outer


def operations(program: Program, loop: Axis) -> tuple[set[str], set[str]]:
    """Return the operations of a program outside of the loop over an axis, and in it."""
    found: tuple[set[str], set[str]] = set(), set()
    for part in program.body:
        lets = (s.value for s in statements((part,)) if isinstance(s, Let))
        inside = isinstance(part, For) and part.axis is loop
        found[inside].update(value.name for value in lets if isinstance(value, Op))
    return found


def test_a_load_before_a_loop_has_a_guard_of_its_own_though_one_in_the_loop_is_equal() -> None:
    """A row b is read once, beside rows of x that a loop visits, all where c < 3."""
    x, b, y = buffer("x", 4, 7), buffer("b", 7), buffer("y", 4, 7)
    m, c = axes("m c", 4, 7)
    few = below(c, 3)
    both = Op("sub", (load(b, c, guard=few), load(x, m, c, guard=few)))
    kernel = Kernel("k", (), (m, c), (Store(y, (index(m), index(c)), both),))
    loop, lanes = Binding(m, LoopKind.LOOP), Binding(c, LoopKind.LANES, 8)
    check_plan(kernel, Plan((loop, lanes)))
