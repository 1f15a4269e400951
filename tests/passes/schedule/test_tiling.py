"""Tiles of products: the widest that fits registers and shared memory and keeps the GPU busy."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from fusec.codegen.targets import (
    A100_MACHINE,
    B200_MACHINE,
    HOPPER_MACHINE,
    RTX_5090_MACHINE,
)
from fusec.ir.dtype import BF16, F32
from fusec.ir.expr import Cast, Op, Reduce
from fusec.ir.graph import Def, Kernel
from fusec.ir.index import index
from fusec.ir.machine import Machine
from fusec.ir.monoid import MAX, SUM
from fusec.passes.fusion.unify import unify
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.schedule import accepts_gpu, gpu_plans
from fusec.passes.schedule.contraction import contractions, spread
from fusec.passes.schedule.plan import Plan
from tests.ir.graphs import axes, buffer, graph, load
from tests.passes.pipelines import kernel_of
from tests.passes.schedule.flat import attention, bindings, f32_of, products

TARGETS = pytest.mark.parametrize("machine", (HOPPER_MACHINE, A100_MACHINE), ids=("sm_90", "sm_80"))


def sum_of_products(m: int, n: int, k: int, count: int) -> Kernel:
    """y[m, n] = sum(k: x0[m, k] * w0[k, n]) + sum(k: x1[m, k] * w1[k, n]) + ..."""
    y = buffer("y", m, n, dtype=BF16)
    i, j, r = axes("m n k", m, n, k)
    inputs, parts = [], []
    for number in range(count):
        x, w = buffer(f"x{number}", m, k, dtype=BF16), buffer(f"w{number}", k, n, dtype=BF16)
        body = Op("mul", (f32_of(load(x, i, r)), f32_of(load(w, r, j))))
        parts.append(Reduce(SUM, (r,), body))
        inputs += [x, w]
    total = functools.reduce(lambda a, b: Op("add", (a, b)), parts)
    return kernel_of(graph(tuple(inputs), (Def(y, (i, j), Cast(total, BF16)),), y))


def first(kernel: Kernel, machine: Machine) -> Plan:
    return gpu_plans(kernel, machine)[0]


def tile(plan: Plan) -> tuple[int, ...]:
    return tuple(b.tile for b in plan.bindings)


@TARGETS
def test_a_large_product_has_tiles_of_128_by_128_in_8_warps(machine: Machine) -> None:
    plans = gpu_plans(products(4096, 4096, 1024), machine)
    plan = next(plan for plan in plans if not plan.roles)
    assert bindings(plan) == "m=grid*128  n=grid*128  k=loop*64"
    assert (plan.warps, plan.stages) == (8, 3)


@TARGETS
def test_two_accumulators_fit_a_wide_tile_and_three_a_narrower_one(machine: Machine) -> None:
    assert tile(first(products(4096, 4096, 1024, count=2), machine))[:2] == (128, 128)
    assert tile(first(products(4096, 4096, 1024, count=3), machine))[:2] == (128, 64)


@TARGETS
def test_products_that_are_added_up_count_once(machine: Machine) -> None:
    assert len(contractions(sum_of_products(4096, 4096, 512, 3), A100_MACHINE)) == 3
    assert tile(first(sum_of_products(4096, 4096, 512, 3), machine))[:2] == (128, 128)


def test_stages_are_as_many_as_shared_memory_holds() -> None:
    kernel = sum_of_products(4096, 4096, 512, 3)
    assert first(kernel, A100_MACHINE).stages == 2
    narrow = replace(A100_MACHINE, sm=replace(A100_MACHINE.sm, shared_bytes=49152))
    assert first(products(4096, 4096, 512), narrow).stages == 2


@TARGETS
def test_few_rows_and_columns_make_smaller_tiles_for_more_programs(machine: Machine) -> None:
    assert tile(first(products(512, 1024, 1024), machine))[:2] == (64, 64)
    assert tile(first(products(16, 4096, 1024), machine))[:2] in ((16, 64), (16, 32))


@TARGETS
def test_f32_operands_have_shorter_steps(machine: Machine) -> None:
    assert tile(first(products(4096, 4096, 1024, dtype=F32), machine)) == (128, 128, 32)


@TARGETS
@pytest.mark.parametrize("count", (1, 2, 3))
def test_a_race_is_offered_a_few_tilings_that_fit(machine: Machine, count: int) -> None:
    offered = gpu_plans(products(4096, 4096, 1024, count=count), machine)
    found = [plan for plan in offered if not plan.roles]
    assert 2 <= len({replace(plan, descriptors=False) for plan in found}) <= 8
    assert len(set(found)) == len(found)
    for plan in found:
        m, n, _ = tile(plan)
        assert count * m * n / (32 * plan.warps) <= machine.sm.tile_registers


def test_an_attention_of_narrow_heads_has_small_programs_that_copy_by_descriptors() -> None:
    """Three or more fit a multiprocessor; of 128 features, or on another machine, they do not."""
    narrow, wide = (attention(64, 512, 4096, depth) for depth in (64, 128))
    plan, other, *_ = gpu_plans(narrow, HOPPER_MACHINE)
    assert tile(plan)[1:3] == (64, 64) and (plan.warps, plan.descriptors) == (4, True)
    assert other == replace(plan, descriptors=False)
    for kernel, machine in ((wide, HOPPER_MACHINE), (narrow, A100_MACHINE)):
        plan = first(kernel, machine)
        assert tile(plan)[1:3] == (128, 64) and (plan.warps, plan.descriptors) == (8, False)


@TARGETS
def test_one_query_takes_few_keys_in_many_warps(machine: Machine) -> None:
    plan = first(attention(512, 1, 4096, 128), machine)
    assert tile(plan)[-2:] == (32, 128) and plan.warps == 8


def partial_sums(rows: int) -> Kernel:
    """y = x @ w, and its column sums over parts of so many rows."""
    m, n, k = 4096, 512, 256
    x, w = buffer("x", m, k, dtype=BF16), buffer("w", k, n, dtype=BF16)
    y, s = buffer("y", m, n), buffer("s", m // rows, n)
    i, j, r = axes("m n k", m, n, k)
    body = Op("mul", (f32_of(load(x, i, r)), f32_of(load(w, r, j))))
    p, c, q = axes("p c q", m // rows, n, rows)
    sums = Reduce(SUM, (q,), load(y, index(p) * rows + index(q), c))
    defs = (Def(y, (i, j), Reduce(SUM, (r,), body)), Def(s, (p, c), sums))
    return kernel_of(graph((x, w), defs, y, s))


@TARGETS
def test_column_sums_do_not_cut_a_products_rows_below_64(machine: Machine) -> None:
    assert accepts_gpu(partial_sums(64), machine)
    assert not accepts_gpu(partial_sums(32), machine)


@pytest.mark.parametrize("rows", (4, 8))
def test_axes_that_walk_memory_as_one_are_one_where_tiles_must_fit(rows: int) -> None:
    # y and z are summed over one another's axes: no order of loops serves both, but tiles do.
    p, n, m = 16, 33, 64
    x, w, v = buffer("x", m, p), buffer("w", m, n), buffer("v", rows, n)
    y, z, s = buffer("y", p, n), buffer("z", m, p), buffer("s", 1)
    i, j, k, r, c, o = axes("i j k r c o", p, n, m, rows, n, 1)
    scaled = Op("mul", (load(x, k, i), Reduce(SUM, (i,), load(x, k, i))))
    defs = (
        Def(y, (i, j), Reduce(SUM, (k,), Op("mul", (load(x, k, i), load(w, k, j))))),
        Def(z, (k, i), scaled),
        Def(s, (o,), Reduce(SUM, (r, c), load(v, r, c))),
    )
    kernel = unify(defs, frozenset((y, z, s)))
    assert accepts_gpu(kernel, A100_MACHINE) is (rows * n <= A100_MACHINE.lanes)
    if accepts_gpu(kernel, A100_MACHINE):
        assert gpu_plans(coalesce(kernel), A100_MACHINE)


def test_few_rows_have_long_steps_and_the_programs_that_fill_the_memory() -> None:
    """With 128 columns 112 programs have as many bytes under way as 224 with 64."""
    chosen, descriptors, described, measured, *others = gpu_plans(
        products(16, 14336, 4096), HOPPER_MACHINE
    )
    assert tile(chosen) == tile(descriptors) == (16, 128, 256) and descriptors.descriptors
    assert tile(described) == tile(measured) == (16, 64, 64) and measured.stages == 6
    assert {tile(plan)[1] for plan in others} >= {32, 128, 256}
    assert tile(first(products(16, 14336, 4096, count=2), HOPPER_MACHINE)) == (16, 128, 128)
    assert tile(first(products(16, 6144, 4096), HOPPER_MACHINE)) == (16, 64, 512)
    assert tile(first(products(16, 4096, 4096), HOPPER_MACHINE)) == (16, 32, 1024)
    assert tile(first(products(16, 1024, 4096), HOPPER_MACHINE)) == (16, 64, 128)
    assert tile(first(products(64, 14336, 4096), HOPPER_MACHINE)) == (64, 64, 64)
    assert tile(first(products(16, 14336, 4096, dtype=F32), HOPPER_MACHINE))[2] == 32


def test_fewer_programs_with_long_steps_reach_the_full_rates() -> None:
    wide, middle, narrow, short = (
        spread(products(16, n, k), HOPPER_MACHINE)
        for n, k in ((14336, 4096), (6144, 4096), (4096, 4096), (4096, 1024))
    )
    assert wide is not None and middle is not None and narrow is not None and short is not None
    assert (wide.full, middle.full, narrow.full) == (0.66, 0.66, 0.66)
    assert 0.66 < short.full < 1.0  # one step has all of its bytes
    assert (wide.parts, middle.parts, narrow.parts, short.parts) == (1, 1, 1, 1)
    few = spread(products(16, 1024, 4096), HOPPER_MACHINE)
    assert few is not None and few.full > 1.0 and few.parts == 8


def test_rows_too_wide_for_shared_memory_are_not_stored_by_descriptors() -> None:
    """y[m, n] = exp(x[m, k] @ w[k, n] - max(n: x[m, k] @ w[k, n])) in f32: 128 KB of a tile."""
    y = buffer("y", 256, 256)
    x, w = buffer("x", 256, 128, dtype=BF16), buffer("w", 128, 256, dtype=BF16)
    i, j, k, n = axes("m n k c", 256, 256, 128, 256)
    row, column = (
        Reduce(SUM, (k,), Op("mul", (f32_of(load(x, i, k)), f32_of(load(w, k, c))))) for c in (n, j)
    )
    body = Op("exp", (Op("sub", (column, Reduce(MAX, (n,), row))),))
    kernel = kernel_of(graph((x, w), (Def(y, (i, j), body),), y))
    for machine, described in ((HOPPER_MACHINE, True), (RTX_5090_MACHINE, False)):
        plans = [plan for plan in gpu_plans(kernel, machine) if tile(plan)[:1] == (128,)]
        assert plans and any(plan.descriptors for plan in plans) is described


@pytest.mark.parametrize(
    ("keys", "depth", "ahead"), [(225, 96, False), (225, 64, True), (256, 96, True)]
)
def test_steps_ahead_are_copied_by_descriptors_on_sm_100(
    keys: int, depth: int, *, ahead: bool
) -> None:
    """A tile with masks of both axes may be loaded by threads, which no fence would order."""
    plans = gpu_plans(attention(8, 256, keys, depth), B200_MACHINE)
    assert any(plan.stages > 1 for plan in plans) is ahead
    assert all(plan.descriptors for plan in plans if plan.stages > 1)
