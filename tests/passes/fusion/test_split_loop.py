"""Split loops: partial and final kernels of products, and of sums beside a maximum."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fusec.codegen.lowering.lower import lower
from fusec.codegen.targets import HOPPER_MACHINE
from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Buffer, Cast, Expr, Op, Reduce, Select, loads, postorder
from fusec.ir.graph import Def, Graph, Kernel, Schedule
from fusec.ir.host import print_host
from fusec.ir.index import Axis, IntoIndex, Size, index
from fusec.ir.monoid import MAX, SUM
from fusec.ir.verify import verify_schedule
from fusec.passes.fusion.cost import kernel_cost
from fusec.passes.fusion.split_loop import split_loop, split_loops
from fusec.passes.fusion.unify import unify
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.memory.buffers import plan_host
from fusec.passes.schedule import contraction, gpu_plans
from fusec.passes.schedule.plan import LoopKind, print_plan
from fusec.tools.interpreter.graph import run_graph
from fusec.tools.interpreter.program import run_program
from tests.ir.graphs import axes, buffer, f32, graph, load, total
from tests.passes.pipelines import check_same, numbers

MACHINE = replace(HOPPER_MACHINE, launch_us=0.0)
"""Where launches cost nothing, so that small loops are split, too."""


def linear(
    rows: int, columns: int, terms: IntoIndex, *, residual: bool = True
) -> tuple[Graph, Schedule]:
    """y[m, n] = sum(k: x[m, k] * w[n, k]) + r[m, n], in f32, as one kernel."""
    x, w = buffer("x", rows, terms), buffer("w", columns, terms)
    r, y = buffer("r", rows, columns), buffer("y", rows, columns)
    m, n, k = axes("m n k", rows, columns, terms)
    product: Expr = total(SUM, k, Op("mul", (load(x, m, k), load(w, n, k))))
    value = Op("add", (product, load(r, m, n))) if residual else product
    sizes = (terms,) if isinstance(terms, Size) else ()
    return _as_kernel(graph((*sizes, x, w, r), (Def(y, (m, n), value),), y))


def attention(keys: int, *, queries: int = 4, depth: int = 16) -> tuple[Graph, Schedule]:
    """y[g, d] and the logarithm of each row's sum, for keys that a mask leaves, as one kernel."""
    q, k, v = buffer("q", queries, depth), buffer("k", keys, depth), buffer("v", keys, depth)
    keep, y, lse = buffer("keep", queries, keys), buffer("y", queries, depth), buffer("l", queries)
    g, n, c, d = axes("g n c d", queries, keys, depth, depth)
    score = total(SUM, c, Op("mul", (load(q, g, c), load(k, n, c))))
    masked = Select(Op("gt", (load(keep, g, n), f32(0.0))), score, f32(-math.inf))
    top = total(MAX, n, masked)
    weight = Op("exp", (Op("sub", (masked, top)),))
    below_it = total(SUM, n, weight)
    blend = total(SUM, n, Op("mul", (Op("div", (weight, below_it)), load(v, n, d))))
    lines = (
        Def(y, (g, d), blend),
        Def(lse, (g,), Op("add", (top, Op("log", (below_it,))))),
    )
    return _as_kernel(graph((q, k, v, keep), lines, y, lse))


def _as_kernel(whole: Graph) -> tuple[Graph, Schedule]:
    lines = tuple(n for n in whole.nodes if isinstance(n, Def))
    kernel = unify(lines, frozenset(line.buffer for line in lines), "k0")
    return whole, Schedule(whole, (kernel,))


def divided(before: Schedule) -> tuple[Kernel, Kernel]:
    """Return the partial and the final kernel of a schedule of one kernel."""
    after = split_loops(before, lambda kernel: split_loop(kernel, MACHINE))
    verify_schedule(after)
    partial, final = after.steps
    assert isinstance(partial, Kernel) and isinstance(final, Kernel)
    return partial, final


def reductions(kernel: Kernel) -> list[Reduce]:
    nodes = postorder(s.expr for s in kernel.stores)
    return [n for n in nodes if isinstance(n, Reduce)]


def is_split(before: Schedule) -> bool:
    (kernel,) = before.steps
    assert isinstance(kernel, Kernel)
    return split_loop(kernel, MACHINE) is not None


# -- products --------------------------------------------------------------------------------------


def test_a_product_of_few_tiles_becomes_parts_and_their_sum_with_the_epilogue() -> None:
    whole, before = linear(4, 64, 2048)
    partial, final = divided(before)
    (part, *_), (within,) = partial.grid, partial.inside
    assert (part.extent, within.extent, within.limit) == (index(4), index(512), None)
    assert [s.buffer.shape for s in partial.stores] == [(index(4), index(4), index(64))]
    assert [s.buffer.dtype for s in partial.stores] == [F32]
    assert {x.buffer.name for x in loads(s.expr for s in final.stores)} == {"y_sum_part", "r"}
    assert (partial.defs, final.defs) == ((), before.steps[0].defs)
    inputs = (numbers(4, 2048), numbers(64, 2048, seed=1), numbers(4, 64, seed=2))
    check_same(whole, Schedule(whole, (partial, final)), inputs)


def test_a_loop_that_no_part_divides_ends_with_a_short_part() -> None:
    whole, before = linear(2, 48, 1300)
    partial, final = divided(before)
    (part, *_), (within,) = partial.grid, partial.inside
    assert within.extent.const % 16 == 0
    assert within.limit is index(1300) - index(part) * within.extent
    inputs = (numbers(2, 1300), numbers(48, 1300, seed=1), numbers(2, 48, seed=2))
    check_same(whole, Schedule(whole, (partial, final)), inputs)


@pytest.mark.parametrize("terms", (1, 500, 1024, 1300, 5000))
def test_parts_of_a_symbolic_loop_cover_every_size(terms: int) -> None:
    size = Size("k", 2048)
    whole, before = linear(2, 32, size)
    partial, final = divided(before)
    inputs = (terms, numbers(2, terms), numbers(32, terms, seed=1), numbers(2, 32, seed=2))
    check_same(whole, Schedule(whole, (partial, final)), inputs)


def test_a_product_with_enough_tiles_or_few_terms_stays_whole() -> None:
    assert is_split(linear(64, 64, 4096)[1])
    assert not is_split(linear(4096, 4096, 4096)[1])
    assert not is_split(linear(64, 64, 1000)[1])


def test_a_launch_that_costs_more_than_the_split_saves_leaves_the_kernel_whole() -> None:
    (kernel,) = linear(4, 64, 2048)[1].steps
    assert isinstance(kernel, Kernel)
    assert split_loop(kernel, replace(MACHINE, launch_us=100.0)) is None


def test_parts_are_so_many_that_there_are_two_programs_for_each_multiprocessor() -> None:
    partial, _ = divided(linear(16, 1024, 8192)[1])
    assert partial.grid[0].extent is index(16)  # 16 tiles of 16 x 64


def test_sums_that_wait_for_another_one_over_the_loop_stay_in_one_kernel() -> None:
    x, w = buffer("x", 4, 4096), buffer("w", 32, 4096)
    y, z = buffer("y", 4, 32), buffer("z", 4, 32)
    m, n, k = axes("m n k", 4, 32, 4096)
    mean = Op("div", (total(SUM, k, load(x, m, k)), f32(4096)))
    centred = Op("sub", (load(x, m, k), mean))
    value = total(SUM, k, Op("mul", (centred, load(w, n, k))))
    assert not is_split(_as_kernel(graph((x, w), (Def(y, (m, n), value),), y))[1])
    plain = total(SUM, k, Op("mul", (load(x, m, k), load(w, n, k))))
    assert is_split(_as_kernel(graph((x, w), (Def(z, (m, n), plain),), z))[1])


# -- sums beside a maximum -------------------------------------------------------------------------


def test_sums_beside_a_maximum_refer_to_the_maximum_of_their_part() -> None:
    partial, final = divided(attention(1024)[1])
    names = [s.buffer.name for s in partial.stores]
    assert [s.buffer.shape[0] for s in partial.stores] == [index(8)] * 3
    assert names == ["y_max_part", "y_sum_part", "y_sum_part_2"]
    (part,) = {n.over for n in reductions(final)}
    assert [a.extent for a in part] == [index(8)]
    assert [n.monoid for n in reductions(final)].count(MAX) == 1


@pytest.mark.parametrize("keys", (1024, 700))
@pytest.mark.parametrize("masked", ("nothing", "a part", "a row"))
def test_what_a_mask_hides_counts_nothing_and_a_row_without_keys_is_as_it_was(
    keys: int, masked: str
) -> None:
    whole, before = attention(keys)
    partial, final = divided(before)
    draw = np.random.default_rng(0)
    keep = np.ones((4, keys))
    if masked == "a part":
        keep[:, :400] = 0
        keep[1] = np.arange(keys) < 3
    if masked == "a row":
        keep[2] = 0
    inputs = (*(draw.standard_normal(s) for s in ((4, 16), (keys, 16), (keys, 16))), keep)
    with np.errstate(all="ignore"):
        expected = run_graph(whole, inputs)
        found = run_graph(Schedule(whole, (partial, final)), inputs)
    for a, b in zip(expected, found, strict=True):
        rows = np.isfinite(a).reshape(4, -1).all(1)
        assert list(rows) == [masked != "a row" or m != 2 for m in range(4)]
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_a_kernel_that_also_stores_the_scores_stays_whole_and_is_priced_so() -> None:
    whole, _ = attention(2048)
    lines = [n for n in whole.nodes if isinstance(n, Def)]
    scores = buffer("scores", 4, 2048)
    q, k, *_ = (b for b in whole.inputs)
    g, n, c = axes("g n c", 4, 2048, 16)
    stored = Def(scores, (g, n), total(SUM, c, Op("mul", (load(q, g, c), load(k, n, c)))))
    both = graph(whole.inputs, (stored, *lines), scores, *(line.buffer for line in lines))
    schedule = _as_kernel(both)[1]
    (kernel,) = schedule.steps
    assert isinstance(kernel, Kernel) and not is_split(schedule)
    found = kernel_cost(kernel, MACHINE).spread
    assert found is not None and found.axis is None


# -- sums that are added to memory ---------------------------------------------------------------


def gradients(queries: int = 256, keys: int = 256, depth: int = 64) -> tuple[Graph, Schedule]:
    """dq[m, d] and dk[n, d] of scores q @ k.T times others, o @ v.T, as one kernel."""
    q, o = (buffer(name, queries, depth, dtype=BF16) for name in "qo")
    k, v = (buffer(name, keys, depth, dtype=BF16) for name in "kv")
    dq, dk = buffer("dq", queries, depth), buffer("dk", keys, depth)
    m, n, c, d = axes("m n c d", queries, keys, depth, depth)

    def wide(source: Buffer, *at: Axis) -> Expr:
        return Cast(load(source, *at), F32)

    score, other = (
        total(SUM, c, Op("mul", (wide(a, m, c), wide(b, n, c)))) for a, b in ((q, k), (o, v))
    )
    made = Op("round_bf16", (Op("mul", (Op("mul", (score, other)), f32(0.001))),))
    lines = (
        Def(dq, (m, d), Op("mul", (total(SUM, n, Op("mul", (made, wide(k, n, d)))), f32(0.5)))),
        Def(dk, (n, d), total(SUM, m, Op("mul", (made, wide(q, m, d))))),
    )
    return _as_kernel(graph((q, k, o, v), lines, dq, dk))


def rows(queries: int, keys: int) -> tuple[np.ndarray, ...]:
    """Return q, k, o and v."""
    return tuple(numbers(n, 64, seed=s) for s, n in enumerate((queries, keys, queries, keys)))


@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (200, 130)])
def test_gradients_in_two_directions_are_one_kernel_that_adds_to_memory(
    queries: int, keys: int
) -> None:
    whole, before = gradients(queries, keys)
    partial, final = divided(before)
    (added,) = [s for s in partial.stores if s.adds]
    assert isinstance(added.expr, Reduce) and not reductions(final)
    assert {x.buffer for x in loads(s.expr for s in final.stores)} == {added.buffer}
    assert len(final.stores) == 1
    plan = gpu_plans(coalesce(partial), MACHINE)[0]
    on_grid = {b.axis for b in plan.bindings if b.kind is LoopKind.GRID}
    assert not on_grid.isdisjoint(added.expr.over), print_plan("k0", plan)
    host = print_host(plan_host(Schedule(whole, (partial, final))))
    assert f"zero {added.buffer.name}" in host
    check_same(whole, Schedule(whole, (partial, final)), rows(queries, keys))


def test_programs_that_add_parts_compute_the_sum() -> None:
    whole, before = gradients(128, 256)
    partial, _ = divided(before)
    flat = coalesce(partial)
    program = lower(flat, gpu_plans(flat, MACHINE)[0])
    assert len(program.added) == 1
    given = dict(zip("qkov", rows(128, 256), strict=True))
    memory = {b: given[b.name].reshape(-1) for b in program.reads}
    run_program(program, memory, {})
    (added,) = program.added
    dq, _ = run_graph(whole, tuple(given.values()))
    np.testing.assert_allclose(memory[added].reshape(128, 64) * 0.5, dq, rtol=1e-5, atol=1e-4)


def test_sums_keep_their_order_where_it_is_asked_for() -> None:
    _, before = gradients()
    (kernel,) = before.kernels
    assert contraction.accepts(kernel, MACHINE)
    in_order = replace(MACHINE, sm=replace(MACHINE.sm, adds=False))
    assert not contraction.accepts(kernel, in_order)
    assert split_loop(kernel, in_order) is None
