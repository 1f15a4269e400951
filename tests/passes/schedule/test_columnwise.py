"""GPU plans of column reductions: columns across lanes, rows in a loop of small tiles."""

from __future__ import annotations

import functools

import pytest

from fusec.codegen.targets import HOPPER_MACHINE
from fusec.ir.expr import Reduce
from fusec.ir.graph import Def
from fusec.ir.monoid import SUM
from fusec.passes.schedule import accepts_gpu, columnwise, gpu_plans
from fusec.passes.schedule.columnwise import accepts
from tests.ir.graphs import axes, buffer, graph, load
from tests.passes.pipelines import kernel_of
from tests.passes.schedule.flat import bindings, columns, line, rows, rows_and_columns

plan = functools.partial(columnwise.plan, machine=HOPPER_MACHINE)


def test_columns_are_accepted_rows_and_pointwise_kernels_are_not() -> None:
    assert accepts(columns(64, 8))
    assert not any(map(accepts, (rows(8, 64), line(64), rows_and_columns(4, 8, 64))))


@pytest.mark.parametrize(
    ("count", "width", "expected", "warps"),
    [
        (4096, 9000, "c=grid*128  m=loop*32", 4),
        (4096, 4096, "c=grid*32  m=loop*128", 8),
        (64, 4096, "c=grid*32  m=loop*64", 8),
        (256, 16384, "c=grid*32  m=loop*128", 8),
        (1024, 16384, "c=grid*128  m=loop*32", 4),
        (4096, 100, "c=grid*32  m=loop*128", 8),
        (4096, 20, "c=grid*32  m=loop*32", 4),
        (7, 768, "c=grid*32  m=loop*8", 4),
        (7, 9000, "c=grid*128  m=loop*8", 4),
    ],
)
def test_a_tile_is_32_rows_by_128_columns_or_more_rows_of_few_columns(
    count: int, width: int, expected: str, warps: int
) -> None:
    found = plan(columns(count, width))
    assert bindings(found) == expected
    assert found.warps == warps


def test_tiles_of_few_rows_are_wider_where_columns_abound() -> None:
    assert bindings(plan(columns(4, 1 << 18))) == "c=grid*256  m=loop*4"
    assert bindings(plan(columns(4, 1 << 14))) == "c=grid*128  m=loop*4"


def test_of_several_reduced_axes_the_last_has_lanes() -> None:
    x, w = buffer("x", 6, 8, 50, 40), buffer("w", 8, 40)
    b, h, t, c = axes("b h t c", 6, 8, 50, 40)
    sums = Reduce(SUM, (b, t), load(x, b, h, t, c))
    kernel = kernel_of(graph((x,), (Def(w, (h, c), sums),), w))
    assert bindings(plan(kernel)) == "h=grid  c=grid*32  b=loop  t=loop*64"


def test_a_grid_of_columns_may_be_as_wide_as_a_vocabulary() -> None:
    wide = columns(8, 1 << 17)
    assert accepts_gpu(wide, HOPPER_MACHINE)
    assert bindings(gpu_plans(wide, HOPPER_MACHINE)[0]) == "c=grid*128  m=loop*8"
