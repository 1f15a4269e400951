"""The CPU's plans: lanes along memory, rows on the grid, chunks that a cache holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusec.codegen.targets import CPU_MACHINE
from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Op, Reduce, Select
from fusec.ir.graph import Def, Kernel
from fusec.ir.index import Size, index
from fusec.ir.monoid import MAX, SUM
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.scans import run_scans
from fusec.passes.kernel.unroll_pairs import unroll_pairs
from fusec.passes.schedule.plan import LoopKind, Plan
from fusec.passes.schedule.vector_loops import (
    accepts_loops,
    lane_axis,
    loop_plans,
)
from tests.ir.graphs import axes, below, buffer, f32, graph, load
from tests.ir.test_serial import until
from tests.passes.pipelines import kernel_of
from tests.passes.schedule.flat import (
    bindings,
    columns,
    line,
    pointwise,
    rows,
    rows_and_columns,
    transposed,
)
from tests.support import check, values

TUNING = CPU_MACHINE.loops


def plan_of(kernel: Kernel, width: int = 16) -> Plan:
    (plan,) = loop_plans(kernel, replace(CPU_MACHINE, vector=width))
    return plan


def found(kernel: Kernel, width: int = 16) -> str:
    return bindings(plan_of(kernel, width))


@pytest.mark.parametrize("width", [4, 8, 16])
def test_lanes_are_as_wide_as_the_machine_s_vectors(width: int) -> None:
    assert found(rows(100, 100), width) == f"m=grid  k=loop*{width}"


def test_rows_are_on_the_grid_and_their_lanes_in_a_loop() -> None:
    assert found(pointwise(100, 600)) == "m=grid  c=loop*16"


@pytest.mark.parametrize(("extent", "tile"), [(7, ""), (8, "*16"), (9, "*16")])
def test_a_row_of_less_than_half_a_vector_has_no_lanes(extent: int, tile: str) -> None:
    assert found(pointwise(100, extent)) == f"m=grid  c=loop{tile}"


def windows(outputs: int, places: int) -> Kernel:
    """y[o] = max(k: x[2*o + k])."""
    o, k = axes("o k", outputs, places)
    x, y = buffer("x", 2 * outputs + places), buffer("y", outputs)
    place = index(o) * 2 + index(k)
    return kernel_of(graph((x,), (Def(y, (o,), Reduce(MAX, (k,), load(x, place))),), y))


@pytest.mark.parametrize(("outputs", "lane"), [(56, "o"), (7, "k")])
def test_outputs_of_short_windows_are_lanes_where_they_fill_vectors(
    outputs: int, lane: str
) -> None:
    chosen = lane_axis(windows(outputs, 3), replace(CPU_MACHINE, vector=16))
    assert chosen is not None and chosen.name == lane


@pytest.mark.parametrize(("inputs", "taps", "lane"), [(64, 9, "m"), (64, 16, "c"), (8, 9, "c")])
def test_of_two_ways_through_memory_one_that_fills_vectors_has_lanes(
    inputs: int, taps: int, lane: str
) -> None:
    chosen = lane_axis(transposed(inputs, taps), replace(CPU_MACHINE, vector=16))
    assert chosen is not None and chosen.name == lane


def pairs(*shape: int, transposed: bool = False) -> Kernel:
    """y[.., p] = where(p < 1, -x[.., 0], x[.., 1]), of x as it lies in memory or transposed."""
    own = axes("a b p"[-2 * len(shape) - 1 :], *shape, 2)
    x, y = buffer("x", *(shape[::-1] if transposed else shape), 2), buffer("y", *shape, 2)
    at = own[:-1][::-1] if transposed else own[:-1]
    body = Select(below(own[-1], 1), Op("neg", (load(x, *at, 0),)), load(x, *at, 1))
    return unroll_pairs(kernel_of(graph((x,), (Def(y, own, body),), y)), CPU_MACHINE)


def test_lanes_run_along_pairs() -> None:
    assert found(pairs(100)) == "b=loop*16" or "b=grid*16" in found(pairs(100))
    assert found(pairs(100, 64, transposed=True)).endswith("b=loop*16")
    assert found(pairs(100, 3)) == "ab=grid*16 by 1"


def test_sums_of_pairs_have_lanes_along_the_sum() -> None:
    x, y, z = buffer("x", 100, 64, 2), buffer("y", 100), buffer("z", 100)
    lines = []
    for k, made in enumerate((y, z)):
        i, r = axes("i r", 100, 64)
        lines.append(Def(made, (i,), Reduce(SUM, (r,), load(x, i, r, k))))
    chosen = lane_axis(kernel_of(graph((x,), tuple(lines), y, z)), CPU_MACHINE)
    assert chosen is not None and chosen.extent is index(64)


def test_the_places_of_a_window_are_innermost_so_that_their_maximum_is_in_a_register() -> None:
    tiles = TUNING.point_elements // 16
    assert found(windows(1 << 20, 5)) == f"o=grid*16 by {tiles}  k=loop"


def test_a_long_vector_is_cut_into_chunks_of_a_cache() -> None:
    tiles = TUNING.point_elements // 16
    assert found(line(1 << 20)) == f"c=grid*16 by {tiles}"


def test_a_short_vector_is_cut_into_points_enough_for_all_threads() -> None:
    kernel = line(16 * 64)
    (binding,) = plan_of(kernel).bindings
    assert binding.kind is LoopKind.GRID
    assert 64 // binding.chunk == TUNING.least_points


@pytest.mark.parametrize("tiles", [4095, 3 * 77 * 5, 1024 + 32])
def test_a_chunk_divides_the_tiles_where_a_divisor_is_near(tiles: int) -> None:
    (binding,) = plan_of(line(16 * tiles)).bindings
    assert tiles % binding.chunk == 0


def test_an_extent_known_at_launch_is_cut_by_its_hint() -> None:
    assert found(line(Size("N", 1 << 20))) == f"c=grid*16 by {TUNING.point_elements // 16}"


def test_few_long_rows_are_cut_as_well() -> None:
    (outer, lane) = plan_of(pointwise(2, 100_000)).bindings
    assert outer.kind is lane.kind is LoopKind.GRID
    assert lane.chunk > 0


def test_a_column_sum_keeps_its_loop_outside_of_the_lanes() -> None:
    """Memory is walked in order; the sums of a chunk of columns wait in a private array."""
    plan = plan_of(columns(4096, 768))
    assert [(b.axis.name, b.kind) for b in plan.bindings] == [
        ("m", LoopKind.LOOP),
        ("c", LoopKind.GRID),
    ]
    assert plan.kept_bytes and plan.peel


def test_partial_column_sums_run_beside_rows() -> None:
    assert found(rows_and_columns(8, 32, 768)) == "p=grid  i=loop  k=loop*16"


@pytest.mark.parametrize(
    ("many", "blocks"), [(2 * TUNING.sum_tiles - 1, ""), (2 * TUNING.sum_tiles, " by 64")]
)
def test_sums_of_long_rows_are_added_in_blocks(many: int, blocks: str) -> None:
    assert found(rows(100, 16 * many)) == f"m=grid  k=loop*16{blocks}"


def test_a_maximum_needs_no_blocks_for_it_loses_no_digits() -> None:
    assert found(rows(100, 1 << 15, monoid=MAX)) == "m=grid  k=loop*16"


def test_without_contiguous_memory_nothing_has_lanes() -> None:
    shape = (index(6), index(8))
    x, y = (Buffer(n, shape, (index(32), index(2)), F32) for n in "xy")
    m, c = axes("m c", 6, 8)
    kernel = kernel_of(graph((x,), (Def(y, (m, c), Op("neg", (load(x, m, c),))),), y))
    assert {b.tile for b in plan_of(kernel).bindings} == {1}


@pytest.mark.parametrize("shape", [(8, 1 << 17), (1 << 17, 8), (3, 200_000)], ids=str)
def test_one_reduction_is_planned_however_long_and_wide(shape: tuple[int, int]) -> None:
    """A vocabulary of 128256 columns is cut into chunks, and so is the array of their sums."""
    for kernel in (rows(*shape), columns(*shape)):
        assert accepts_loops(kernel, CPU_MACHINE)
        assert plan_of(kernel).bindings


def test_a_private_array_longer_than_a_cache_is_refused() -> None:
    assert accepts_loops(rows_and_columns(4, 8, 1 << 16), CPU_MACHINE)
    assert not accepts_loops(rows_and_columns(4, 8, (1 << 16) + 64), CPU_MACHINE)


@pytest.mark.parametrize(
    ("m", "c", "plan"),
    [
        (512, 600, "c=grid*16 by 1  m=grid by 16 transposed"),
        (16, 100_000, "c=grid*16 by 1  m=grid by 16 transposed"),
        (15, 600, "m=grid  c=grid*16 by 38"),  # fills no block
        (600, 15, "c=grid  m=grid*16 by 38"),
    ],
)
def test_what_is_written_along_another_axis_than_it_is_read_is_turned(
    m: int, c: int, plan: str
) -> None:
    rows, columns = axes("m c", m, c)
    x, y = buffer("x", c, m), buffer("y", m, c)
    assert (
        found(kernel_of(graph((x,), (Def(y, (rows, columns), load(x, columns, rows)),), y))) == plan
    )


def class_first(classes: int, points: int, *, kept: bool) -> Kernel:
    """y[c, p] = x[p, c] - max(c: x[p, c]), or the maximum alone."""
    p, c = axes("p c", points, classes)
    x, y = buffer("x", points, classes), buffer("y", classes, points)
    top = Reduce(MAX, (c,), load(x, p, c))
    if not kept:
        only = buffer("top", points)
        return kernel_of(graph((x,), (Def(only, (p,), top),), only))
    return kernel_of(graph((x,), (Def(y, (c, p), Op("sub", (load(x, p, c), top))),), y))


def test_what_reductions_read_is_turned_if_results_as_large_are_written_the_other_way() -> None:
    assert found(class_first(21, 600, kept=True)) == "p=grid*16 by 2  c=loop by 16 transposed"
    assert found(class_first(21, 600, kept=False)) == "p=grid  c=loop*16"
    assert found(class_first(15, 600, kept=True)) == "p=grid*16 by 2  c=loop"


@pytest.mark.parametrize(
    ("width", "plan"),
    [(2048, "i=grid  j=loop  k=grid*16 by 64"), (48, "i=grid  k=loop*16  j=loop")],
)
def test_each_step_of_a_scan_along_an_outer_axis_has_many_columns(width: int, plan: str) -> None:
    i, j, k, before = axes("i j k p", 20, 300, width, 300)
    x, y = buffer("x", 20, 300, width), buffer("y", 20, 300, width)
    total = Reduce(SUM, (before,), Select(until(before, j), load(x, i, before, k), f32(0)))
    kernel = run_scans(coalesce(kernel_of(graph((x,), (Def(y, (i, j, k), total),), y))))
    assert found(kernel) == plan


@pytest.mark.parametrize(
    ("length", "gate", "plan"),
    [
        (9, "sigmoid", "b=grid  c=grid*64  k=lanes(16)"),
        (49, "sigmoid", "b=grid  c=grid*64  k=lanes(64)"),
        (49, "abs", "b=grid  c=grid  k=loop*16"),
        (300, "sigmoid", "b=grid  c=grid  k=loop*16"),
    ],
    ids=["short", "longer", "cheap", "long"],
)
def test_what_short_rows_share_is_computed_in_vectors(length: int, gate: str, plan: str) -> None:
    """y[b, c, k] = x[b, c, k] * gate(s[c])"""
    own = axes("b c k", 64, 32, length)
    x, s, y = buffer("x", 64, 32, length), buffer("s", 32), buffer("y", 64, 32, length)
    body = Op("mul", (load(x, *own), Op(gate, (load(s, own[1]),))))
    assert found(kernel_of(graph((x, s), (Def(y, own, body),), y))) == plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 70, 3, 3), (3, 5, 7, 7), (2, 64, 1, 1), (1, 130, 5, 9)])
def test_gates_of_short_rows_are_as_eager_s(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def gated(x: torch.Tensor, s: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * torch.sigmoid(s)[:, :, None, None] + torch.tanh(c)[:, None, None]
        return y, (x > 0) & (torch.exp(c)[:, None, None] < 1), torch.sigmoid(s) + c

    batch, channels = shape[:2]
    given = [values(*n).to(dtype) for n in (shape, (batch, channels), (channels,))]
    given[0].view(-1)[1], given[1].view(-1)[3] = float("nan"), float("inf")
    check(gated, *given)
