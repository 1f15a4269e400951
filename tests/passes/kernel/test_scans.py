"""Scans run in the loop that they scan along."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.codegen.targets import find_target
from fusec.errors import InternalError
from fusec.ir.dtype import I64
from fusec.ir.expr import Const, Expr, IndexValue, Load, Op, Reduce, Scan, Select, reductions
from fusec.ir.graph import Def, FlatKernel, kernel_nodes
from fusec.ir.index import index
from fusec.ir.monoid import RECURRENCE, SUM
from fusec.passes.kernel.coalesce import coalesce
from fusec.passes.kernel.scans import check_order, run_scans
from fusec.passes.schedule.vector_loops import accepts_loops
from tests.ir.graphs import axes, buffer, f32, graph, load
from tests.ir.test_serial import until
from tests.passes.kernel.test_unroll_windows import run
from tests.passes.pipelines import kernel_of


def cumulative(times: int = 1, *, stored: bool = False) -> FlatKernel:
    """y = cumsum(... cumsum(x)) * x, along the last axis, with all sums but the last if stored."""
    x = buffer("x", 4, 50)
    made, lines = x, []
    for k in range(times):
        y = buffer(f"s{k}", 4, 50)
        m, i, j = axes("m i j", 4, 50, 50)
        lines.append(
            Def(y, (m, i), Reduce(SUM, (j,), Select(until(j, i), load(made, m, j), f32(0))))
        )
        made = y
    y = buffer("y", 4, 50)
    m, i = axes("m i", 4, 50)
    lines.append(Def(y, (m, i), Op("mul", (load(made, m, i), load(x, m, i)))))
    sums = [line.buffer for line in lines[:-1]] if stored else []
    return coalesce(kernel_of(graph((x,), tuple(lines), *sums, y)))


def test_a_scan_takes_the_place_of_a_reduction_and_its_axis() -> None:
    kernel = cumulative()
    found = FlatKernel(run_scans(kernel))
    (store,) = found.stores
    assert not reductions(store.expr) and len(found.axes) == len(kernel.axes) - 1
    (scan,) = (n for n in kernel_nodes(found) if isinstance(n, Scan))
    assert set(scan.over) <= set(found.inside)
    assert len([n for n in kernel_nodes(found) if isinstance(n, Load)]) == 1
    assert np.allclose(run(found)["y"], run(kernel)["y"], rtol=1e-5, atol=1e-6)


def test_a_scan_of_a_scan() -> None:
    kernel = cumulative(2)
    found = FlatKernel(run_scans(kernel))
    assert len([n for n in kernel_nodes(found) if isinstance(n, Scan)]) == 2
    assert len(found.inside) == 1
    assert np.allclose(run(found)["y"], run(kernel)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("times", (2, 3))
def test_scans_that_are_stored_and_scanned_run_in_one_loop(times: int) -> None:
    kernel = cumulative(times, stored=True)
    assert len(kernel.stores) == times + 1
    found = FlatKernel(run_scans(kernel))
    assert len(found.inside) == 1
    assert len([n for n in kernel_nodes(found) if isinstance(n, Scan)]) == times
    expected, made = run(kernel), run(found)
    assert all(np.allclose(made[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


def mixed(*backwards: bool) -> FlatKernel:
    """y = cumsum(x), each forwards or backwards, one after another."""
    x = buffer("x", 4, 50)
    made, lines = x, []
    for k, back in enumerate(backwards):
        y = buffer(f"y{k}", 4, 50)
        m, i, j = axes("m i j", 4, 50, 50)
        counts = until(i, j) if back else until(j, i)
        lines.append(Def(y, (m, i), Reduce(SUM, (j,), Select(counts, load(made, m, j), f32(0)))))
        made = y
    m, i = axes("m i", 4, 50)
    y = buffer("y", 4, 50)
    lines.append(Def(y, (m, i), Op("sub", (load(made, m, i), load(x, m, i)))))
    return coalesce(kernel_of(graph((x,), tuple(lines), y)))


@pytest.mark.parametrize("times", (1, 2))
def test_a_kernel_whose_scans_run_backwards_turns_around(times: int) -> None:
    kernel = mixed(*[True] * times)
    found = FlatKernel(run_scans(kernel))
    assert len([n for n in kernel_nodes(found) if isinstance(n, Scan)]) == times
    assert np.allclose(run(found)["y"], run(kernel)["y"], rtol=1e-5, atol=1e-5)


def test_a_kernel_with_scans_in_both_directions_stays_and_is_not_made() -> None:
    kernel = mixed(True, False)
    assert run_scans(kernel) is kernel
    assert not accepts_loops(kernel, find_target("cpu:avx512").machine)
    assert accepts_loops(mixed(True, True), find_target("cpu:avx512").machine)


def test_a_kernel_without_scans_stays() -> None:
    x, y = buffer("x", 4, 50), buffer("y", 4)
    m, j = axes("m j", 4, 50)
    kernel = coalesce(kernel_of(graph((x,), (Def(y, (m,), Reduce(SUM, (j,), load(x, m, j))),), y)))
    assert run_scans(kernel) is kernel


def test_an_ordered_reduction_that_runs_backwards_is_a_scan_or_a_defect() -> None:
    """As a loop it would combine its points from the first to the last."""
    x, y = buffer("x", 50), buffer("y", 50)
    i, j = axes("i j", 50, 50)
    here = Op("ge", (IndexValue(index(i)), Const(1, I64)))

    def kernel(condition: Expr) -> FlatKernel:
        bodies = (Select(condition, load(x, j), f32(1)), Select(condition, load(x, j), f32(-0.0)))
        value = Reduce(RECURRENCE, (j,), *bodies)
        return coalesce(kernel_of(graph((x,), (Def(y, (i,), value),), y)))

    made = check_order(run_scans(kernel(until(i, j))))
    assert any(isinstance(n, Scan) for n in kernel_nodes(made))
    with pytest.raises(InternalError, match="is no scan"):
        check_order(kernel(Op("and", (until(i, j), here))))
