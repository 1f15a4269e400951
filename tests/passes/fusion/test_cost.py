"""The modelled cost of a kernel: bytes once, operations where they run, a grid that keeps busy."""

from __future__ import annotations

import pytest

from fusec.codegen.targets import CPU_MACHINE, HOPPER_MACHINE
from fusec.ir.dtype import BF16, F32, I64
from fusec.ir.expr import Buffer, Cast, Op
from fusec.ir.graph import Def, Extern, Graph, Kernel, whole_view
from fusec.ir.index import Runtime, Size, index
from fusec.ir.machine import Machine
from fusec.ir.monoid import SUM
from fusec.ir.scalar import SCALAR_OPS
from fusec.passes.dag import find_uses
from fusec.passes.fusion.cost import call_cost, kernel_cost, kernel_operations, numel, programs
from fusec.passes.fusion.footprint import kernel_traffic
from fusec.passes.fusion.unify import unify
from tests.ir.graphs import axes, buffer, f32, gather, graph, layer_norm, load, total
from tests.passes.kernel.test_scans import cumulative
from tests.passes.schedule.flat import f32_of

SIMPLE = Machine(
    bytes_per_us=100.0, operations_per_us=10.0, launch_us=5.0, units=4, parts=4, tile=16
)


def unified(before: Graph) -> Kernel:
    """Return one kernel that computes all of a graph."""
    defs = tuple(n for n in before.nodes if isinstance(n, Def))
    return unify(defs, find_uses(before).live_out)


def traffic(before: Graph) -> dict[str, tuple[int, int]]:
    return {b.name: both for b, both in kernel_traffic(unified(before)).items()}


def test_a_fused_norm_moves_its_inputs_and_outputs_once() -> None:
    assert traffic(layer_norm(6, 32, BF16)) == {
        "x": (6 * 32 * 2, 0),
        "w": (32 * 4, 0),
        "b": (32 * 4, 0),
        "rstd": (0, 6 * 4),
        "y": (0, 6 * 32 * 2),
    }


def test_a_gather_reads_what_it_returns_not_the_table() -> None:
    assert traffic(gather(1000, 8, 5))["table"] == (5 * 8 * 4, 0)


def test_a_slice_reads_its_own_elements() -> None:
    x, y = buffer("x", 100, 8), buffer("y", 3, 8)
    m, c = axes("m c", 3, 8)
    line = Def(y, (m, c), Op("neg", (load(x, index(m) + 7, c),)))
    assert traffic(graph((x,), (line,), y)) == {"x": (96, 0), "y": (0, 96)}


def test_what_is_computed_from_another_place_is_read_once() -> None:
    x, y = buffer("x", 16), buffer("y", 16)
    (i,) = axes("i", 16)
    both = Op("add", (load(x, i), load(x, index(15) - index(i))))
    assert traffic(graph((x,), (Def(y, (i,), both),), y))["x"] == (64, 0)


def test_an_expanded_axis_has_one_element() -> None:
    shape = (index(6), index(32))
    assert numel(Buffer("x", shape, (index(0), index(1)), F32)) == 32
    assert numel(Buffer("x", shape, (index(32), index(1)), F32)) == 192


def test_sizes_count_at_their_hints() -> None:
    assert numel(buffer("x", Size("N", 10), 4)) == 40


def test_an_operation_counts_where_its_axes_run() -> None:
    """12 loads, a sum of 12, 12 subtractions from it, and 3 negations of the same sum."""
    x, y, z = buffer("x", 3, 4), buffer("y", 3, 4), buffer("z", 3)
    m, c, k = axes("m c k", 3, 4, 4)
    rows = total(SUM, k, load(x, m, k))
    first = Def(y, (m, c), Op("sub", (load(x, m, c), rows)))
    m, k = axes("m k", 3, 4)
    second = Def(z, (m,), Op("neg", (total(SUM, k, load(x, m, k)),)))
    kernel = unified(graph((x,), (first, second), y, z))
    assert kernel_operations(kernel) == 12 + 12 + 12 + 3


def pointwise(rows: int) -> Kernel:
    x, y = buffer("x", rows, 32), buffer("y", rows, 32)
    m, c = axes("m c", rows, 32)
    line = Def(y, (m, c), Op("neg", (load(x, m, c),)))
    return unified(graph((x,), (line,), y))


def test_a_scan_of_scans_takes_a_step_for_each_point() -> None:
    """Its elements were counted once for each pair of points."""
    one, three = (kernel_operations(cumulative(times)) for times in (1, 3))
    assert three < 4 * one


def test_a_busy_grid_costs_a_launch_and_the_slower_of_memory_and_arithmetic() -> None:
    found = kernel_cost(pointwise(10), SIMPLE)
    assert (found.bytes, found.operations) == (2 * 320 * 4, 2 * 320)
    assert found.us == pytest.approx(max(2560 / 100, 640 / 10) + 5)


def row_sum(rows: int) -> Kernel:
    x, s = buffer("x", rows, 32), buffer("s", rows)
    m, c = axes("m c", rows, 32)
    return unified(graph((x,), (Def(s, (m,), total(SUM, c, load(x, m, c))),), s))


def test_a_grid_too_small_for_the_machine_uses_a_part_of_it() -> None:
    busy, idle = kernel_cost(row_sum(4), SIMPLE), kernel_cost(row_sum(1), SIMPLE)
    assert idle.us - 5 == pytest.approx(busy.us - 5)  # a fourth of the work, on a fourth
    assert kernel_cost(row_sum(8), SIMPLE).us - 5 == pytest.approx(2 * (busy.us - 5))


def test_columns_count_as_the_tiles_that_lanes_take() -> None:
    """A grid of 768 columns is six programs of 128, not 768."""
    x, s = buffer("x", 4096, 768), buffer("s", 768)
    m, c = axes("m c", 4096, 768)
    kernel = unified(graph((x,), (Def(s, (c,), total(SUM, m, load(x, m, c))),), s))
    assert programs(kernel, HOPPER_MACHINE) == 6
    assert programs(row_sum(100), HOPPER_MACHINE) == 100


@pytest.mark.parametrize("machine", [CPU_MACHINE, HOPPER_MACHINE], ids=["cpu", "h200"])
@pytest.mark.parametrize("rows", [8, 4096])
def test_one_kernel_is_cheaper_than_its_definitions_apart(machine: Machine, rows: int) -> None:
    whole = layer_norm(rows, 768)
    parts = [n for n in whole.nodes if isinstance(n, Def)]
    apart = sum(kernel_cost(unify((d,), frozenset((d.buffer,))), machine).us for d in parts)
    assert kernel_cost(unified(whole), machine).us < apart - 2 * machine.launch_us * 0.99


def test_what_is_multiplied_is_computed_again_for_each_tile_of_columns() -> None:
    """A product of exp(x), in f32, with 1024 columns, 64 a tile: 16 read and compute it."""
    x, w = buffer("x", 4096, 64, dtype=BF16), buffer("w", 64, 1024, dtype=BF16)
    y = buffer("y", 4096, 1024)
    m, n, k = axes("m n k", 4096, 1024, 64)
    weighed = Op("mul", (Op("exp", (f32_of(load(x, m, k)),)), f32_of(load(w, k, n))))
    kernel = unified(graph((x, w), (Def(y, (m, n), total(SUM, k, weighed)),), y))
    again = kernel_cost(kernel, HOPPER_MACHINE).operations - kernel_operations(kernel)
    assert again == SCALAR_OPS["exp"].cost * 4096 * 64 * 15
    assert kernel_cost(kernel, CPU_MACHINE).operations == kernel_operations(kernel)


def test_what_follows_a_product_by_roles_is_added_to_it() -> None:
    """exp(x @ w) of 31 x 64 tiles of 128 x 256: 15.03 waves take 16, and then come exponentials."""
    m, n, k = (31 * 128, 64 * 256, 1024)
    x, w = buffer("x", m, k, dtype=BF16), buffer("w", k, n, dtype=BF16)
    y = buffer("y", m, n, dtype=BF16)
    i, j, r = axes("m n k", m, n, k)
    body = Op("mul", (f32_of(load(x, i, r)), f32_of(load(w, r, j))))
    line = Def(y, (i, j), Cast(Op("exp", (total(SUM, r, body),)), BF16))
    found = kernel_cost(unified(graph((x, w), (line,), y)), HOPPER_MACHINE)
    products_us = m * n * k / (HOPPER_MACHINE.rates.roles * HOPPER_MACHINE.products_per_us)
    behind_us = found.operations / HOPPER_MACHINE.operations_per_us
    assert behind_us > 0.1 * products_us
    share = 31 * 64 / (16 * 132)
    assert found.us == pytest.approx((products_us + behind_us) / share + HOPPER_MACHINE.launch_us)


def test_positions_read_from_memory_are_traffic_too() -> None:
    table, ids, y = buffer("t", 50), buffer("ids", 4, dtype=I64), buffer("y", 4)
    (i,) = axes("i", 4)
    row = index(Runtime(load(ids, i), index(50)))
    line = Def(y, (i,), Op("mul", (load(table, row), f32(2))))
    assert traffic(graph((table, ids), (line,), y)) == {"ids": (32, 0), "t": (16, 0), "y": (0, 16)}


def test_a_call_in_place_costs_its_bytes_and_a_launch() -> None:
    """It has no result, whose tiles could be few."""
    x = buffer("x", 25)
    call = Extern("n", "aten.relu_.default", (whole_view(x),), (), (), "in place", impure=True)
    assert call_cost(call, SIMPLE).us == pytest.approx(25 * 4 / 100 + 5)


def squares(rows: int, parts: int, row: int, *, squared: bool = True) -> Kernel:
    """w[m] = sum(p: s[m, p] * s[m, p]), or of s alone, where s[m, p] = sum(c: x[m, p, c])."""
    x, w = buffer("x", rows, parts, row), buffer("w", rows)
    m, p, c = axes("m p c", rows, parts, row)
    inner = total(SUM, c, load(x, m, p, c))
    outer = total(SUM, p, inner * inner if squared else inner)
    return unified(graph((x,), (Def(w, (m,), outer),), w))


def test_a_loop_that_adds_up_a_number_of_each_sum_waits_for_each() -> None:
    """Squares of sums, unlike sums of sums: 256 parts of a row, of which an iteration has four."""
    waits = 64 * HOPPER_MACHINE.rows.step_us + HOPPER_MACHINE.launch_us
    assert kernel_cost(squares(200, 256, 1024), HOPPER_MACHINE).us == pytest.approx(waits)
    plain = squares(200, 256, 1024, squared=False)
    assert kernel_cost(plain, HOPPER_MACHINE).us < 0.9 * waits


@pytest.mark.parametrize(("parts", "row"), [(128, 64), (32, 128), (16, 256)])
def test_parts_that_registers_or_an_iteration_hold_wait_for_nothing(parts: int, row: int) -> None:
    """As the statistics of a row of a product, whose parts are its tiles."""
    found, plain = (
        kernel_cost(squares(100, parts, row, squared=squared), HOPPER_MACHINE).us
        for squared in (True, False)
    )
    assert found == pytest.approx(plain, rel=0.01)
