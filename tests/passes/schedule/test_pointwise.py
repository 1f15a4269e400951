"""GPU tiles of pointwise kernels: two 16-byte vectors of the widest type a thread and tensor."""

from __future__ import annotations

import functools

import pytest

from fusec.codegen.targets import HOPPER_MACHINE
from fusec.ir.dtype import BF16, F32, F64, I64, DType
from fusec.ir.expr import Op
from fusec.ir.graph import Def
from fusec.passes.schedule import gpu_plans
from fusec.passes.schedule import pointwise as schedule
from fusec.passes.schedule.pointwise import accepts, power_of_two
from tests.ir.graphs import axes, buffer, graph, load
from tests.passes.pipelines import kernel_of
from tests.passes.schedule.flat import (
    bindings,
    columns,
    f32_of,
    line,
    pointwise,
    rows,
    to,
    transposed,
)

plan = functools.partial(schedule.plan, machine=HOPPER_MACHINE)


def test_only_kernels_without_reductions_are_pointwise() -> None:
    assert accepts(line(64)) and accepts(transposed(32, 64))
    assert not accepts(rows(8, 64)) and not accepts(columns(64, 8))


@pytest.mark.parametrize(("dtype", "tile"), [(F32, 1024), (BF16, 2048), (F64, 512)])
def test_a_thread_has_two_vectors_of_16_bytes(dtype: DType, tile: int) -> None:
    found = plan(line(1 << 20, dtype))
    assert bindings(found) == f"c=grid*{tile}"
    assert found.warps * 32 == 128
    assert tile * dtype.itemsize == 128 * 2 * 16


def test_the_widest_type_of_a_kernel_decides() -> None:
    assert bindings(plan(pointwise(64, 4096, dtype=BF16, row=F32))) == "m=grid  c=grid*1024"


def test_what_is_one_value_a_row_is_in_no_vector() -> None:
    """The class of a row, in 64 bits, beside 128256 logits: some of the last tile's lanes wait."""
    x, y = buffer("x", 8192, 128256, dtype=BF16), buffer("y", 8192, 128256, dtype=BF16)
    target = buffer("t", 8192, dtype=I64)
    m, c = axes("m c", 8192, 128256)
    value = Op("mul", (f32_of(load(x, m, c)), f32_of(load(target, m))))
    kernel = kernel_of(graph((x, target), (Def(y, (m, c), to(value, BF16)),), y))
    assert bindings(plan(kernel)) == "m=grid  c=grid*2048"


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (3072, "m=grid  c=grid*1024"),
        (1536, "m=grid*2  c=grid*512"),
        (600, "m=grid*8  c=grid*128"),
        (512, "m=grid*2  c=grid*512"),
        (500, "m=grid*2  c=grid*512"),
        (64, "m=grid*16  c=grid*64"),
        (3, "m=grid*256  c=grid*4"),
    ],
)
def test_tiles_end_where_rows_end_and_short_rows_share_one(width: int, expected: str) -> None:
    assert bindings(plan(pointwise(4096, width))) == expected


@pytest.mark.parametrize(
    ("heads", "width", "expected"),
    [
        (32, 64, "h=grid*16  m=grid  c=grid*64"),
        (4, 64, "h=grid  m=grid*16  c=grid*64"),
        (32, 16, "h=grid  m=grid*64  c=grid*16"),
    ],
    ids=["many", "fewer than rows of a tile", "of less than a line of the cache"],
)
def test_a_tile_has_the_rows_that_share_what_is_loaded(
    heads: int, width: int, expected: str
) -> None:
    """y[h, m, c] = x[h, m, c] * w[m, c], as the angles of a rotary embedding for all heads."""
    x, y = buffer("x", heads, 512, width), buffer("y", heads, 512, width)
    w = buffer("w", 512, width + 2)
    h, m, c = axes("h m c", heads, 512, width)
    line = Def(y, (h, m, c), Op("mul", (load(x, h, m, c), load(w, m, c))))
    assert bindings(plan(kernel_of(graph((x, w), (line,), y)))) == expected


def test_a_function_with_much_code_has_fewer_elements_a_thread() -> None:
    assert [plan(line(4096, name=name)).warps for name in ("neg", "cos")] == [4, 8]


def test_a_tile_has_no_more_rows_than_the_tensor() -> None:
    assert bindings(plan(pointwise(6, 64))) == "m=grid*8  c=grid*64"


@pytest.mark.parametrize(
    ("dtype", "side", "warps"), [(F32, 32, 4), (BF16, 64, 8)], ids=["f32", "bf16"]
)
def test_a_transpose_gets_square_tiles(dtype: DType, side: int, warps: int) -> None:
    found = plan(transposed(256, 512, dtype))
    assert bindings(found) == f"m=grid*{side}  c=grid*{side}"
    assert found.warps == warps


def test_a_transpose_of_few_rows_is_read_as_it_lies() -> None:
    """Nothing is gained by a square of which most lanes are masked."""
    assert "*32" not in bindings(plan(transposed(8, 512)))


def test_gpu_plans_peel_nothing_and_have_no_private_memory() -> None:
    for kernel in (line(64), rows(8, 64), columns(64, 8)):
        found = gpu_plans(kernel, HOPPER_MACHINE)[0]
        assert not found.peel and not found.kept_bytes


def test_powers_of_two_round_up() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1025)] == [
        1, 1, 2, 4, 4, 8, 1024, 2048
    ]  # fmt: skip
