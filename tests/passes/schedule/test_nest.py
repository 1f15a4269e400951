"""The order of loops, and when one order serves all reductions of a kernel."""

from __future__ import annotations

import pytest

from fusec.codegen.targets import CPU_MACHINE, HOPPER_MACHINE
from fusec.ir.expr import Op, Reduce
from fusec.ir.graph import Def, Kernel
from fusec.ir.index import Axis, index
from fusec.ir.machine import Machine
from fusec.ir.monoid import MAX, SUM
from fusec.passes.schedule.nest import nest_order
from tests.ir.graphs import axes, buffer, graph, load, total
from tests.passes.pipelines import kernel_of
from tests.passes.schedule.flat import columns, rows, rows_and_columns

LONGEST = CPU_MACHINE.loops.array


def named(kernel: Kernel, name: str) -> Axis:
    return next(a for a in kernel.axes if a.name == name)


def order(kernel: Kernel, lane: Axis | None, machine: Machine) -> list[str] | None:
    found = nest_order(kernel, lane, machine)
    return None if found is None else [a.name for a in found]


def nested_sums() -> Kernel:
    """y = max(m: sum(c: x[m, c])): c within m."""
    x, y = buffer("x", 6, 8), buffer("y", 1)
    (z,), (m, c) = axes("z", 1), axes("m c", 6, 8)
    best = total(MAX, m, Op("abs", (total(SUM, c, load(x, m, c)),)))
    return kernel_of(graph((x,), (Def(y, (z,), best),), y))


@pytest.mark.parametrize("machine", [CPU_MACHINE, HOPPER_MACHINE])
def test_what_a_sum_varies_along_runs_outside_of_it(machine: Machine) -> None:
    kernel = nested_sums()
    assert order(kernel, named(kernel, "c"), machine) == ["m", "c"]


def test_lanes_are_innermost_and_cannot_be_summed_out_of_an_array() -> None:
    kernel = rows_and_columns(4, 8, 64)
    (lane,) = (a for a in kernel.inside if a.name == "k")
    assert order(kernel, lane, CPU_MACHINE) == ["i", "k"]
    assert order(kernel, lane, HOPPER_MACHINE) == ["i", "k"]


def both_ways() -> Kernel:
    """Row sums and column sums of one matrix that is no one's grid."""
    x, s, t = buffer("x", 6, 8), buffer("s", 6), buffer("t", 8)
    m, c = axes("m c", 6, 8)
    first = Def(s, (m,), total(SUM, c, load(x, m, c)))
    m, c = axes("m c", 6, 8)
    second = Def(t, (c,), total(MAX, m, load(x, m, c)))
    return kernel_of(graph((x,), (first, second), s, t))


def test_sums_both_ways_need_an_array_for_one_of_them() -> None:
    kernel = both_ways()
    assert order(kernel, named(kernel, "c"), CPU_MACHINE) == ["m", "c"]
    assert order(kernel, None, HOPPER_MACHINE) is None  # each would have to be within the other
    # With c in lanes a column's maximum is a tile, which is no array.
    assert order(kernel, named(kernel, "c"), HOPPER_MACHINE) == ["m", "c"]


def test_an_array_fits_the_cache_or_the_kernel_is_refused() -> None:
    x, w = buffer("x", 4, 2 * LONGEST), buffer("w", 2 * LONGEST)
    m, c = axes("m c", 4, 2 * LONGEST)
    kernel = kernel_of(graph((x,), (Def(w, (c,), total(SUM, m, load(x, m, c))),), w))
    assert nest_order(kernel, None, CPU_MACHINE) is not None  # c is on the grid: no array
    y = buffer("y", 4)
    n, k = axes("n k", 4, 2 * LONGEST)
    first = Def(y, (n,), total(SUM, k, load(x, n, k)))
    m, c = axes("m c", 4, 2 * LONGEST)
    second = Def(w, (c,), Reduce(SUM, (m,), load(x, m, c)))
    wide = kernel_of(graph((x,), (first, second), y, w))
    fast = max(wide.axes, key=lambda a: a.extent.const)
    assert nest_order(wide, fast, CPU_MACHINE) is None


def test_a_ragged_axis_runs_within_the_axis_that_its_end_depends_on() -> None:
    x, out = buffer("x", 10), buffer("out", 1)
    o, (z,) = Axis("o", index(4)), axes("z", 1)
    i = Axis("i", index(3), limit=index(10) - index(o) * 3)
    sums = Reduce(SUM, (i, o), load(x, index(o) * 3 + i))
    kernel = kernel_of(graph((x,), (Def(out, (z,), sums),), out))
    assert order(kernel, None, CPU_MACHINE) == ["o", "i"]


def test_a_lane_on_the_grid_is_no_part_of_the_nest() -> None:
    kernel = columns(64, 8)
    (c,) = kernel.grid
    assert order(kernel, c, CPU_MACHINE) == ["m"]
    by_rows = rows(4, 8)
    assert order(by_rows, by_rows.inside[0], CPU_MACHINE) == [by_rows.inside[0].name]
