"""GPU plans of row kernels: 32 elements a thread, a row in registers where it fits."""

from __future__ import annotations

import functools

import pytest

from fusec.codegen.targets import HOPPER_MACHINE
from fusec.ir.dtype import BF16
from fusec.ir.graph import FlatKernel
from fusec.ir.index import Axis, Size, index
from fusec.ir.monoid import SUM
from fusec.passes.kernel.unroll_parts import unroll_parts
from fusec.passes.schedule import accepts_gpu, rowwise
from fusec.passes.schedule.pointwise import power_of_two
from fusec.passes.schedule.rowwise import accepts, is_resident
from tests.passes.schedule.flat import (
    bindings,
    columns,
    line,
    rows,
    rows_and_columns,
    split_rows,
)

plan = functools.partial(rowwise.plan, machine=HOPPER_MACHINE)
TUNING = HOPPER_MACHINE.rows


def test_rows_are_accepted_columns_and_pointwise_kernels_are_not() -> None:
    assert accepts(rows(8, 64)) and accepts(rows_and_columns(4, 8, 64))
    assert not accepts(columns(64, 8)) and not accepts(line(64))


@pytest.mark.parametrize(
    ("width", "lanes", "warps"),
    [
        (512, 512, 1),
        (1024, 1024, 1),
        (1600, 2048, 2),
        (2048, 2048, 2),
        (4096, 4096, 4),
        (8192, 8192, 8),
        (16384, 16384, 16),
        (32768, 32768, 16),
    ],
)
def test_a_row_has_a_warp_for_each_1024_elements_of_its_lanes(
    width: int, lanes: int, warps: int
) -> None:
    found = plan(rows(100, width))
    assert bindings(found) == f"m=grid  k=lanes({lanes})"
    assert found.warps == warps


@pytest.mark.parametrize(("width", "shared"), [(256, 4), (128, 8), (100, 8), (64, 16), (16, 64)])
def test_rows_of_at_most_256_elements_share_a_program_of_1024(width: int, shared: int) -> None:
    found = plan(rows(100, width))
    assert bindings(found).startswith(f"m=grid*{shared}  ")
    assert found.warps == 1


def test_no_program_has_more_than_64_rows_or_than_there_are() -> None:
    assert bindings(plan(rows(100, 3))) == "m=grid*64  k=lanes(4)"
    assert bindings(plan(rows(2, 3))) == "m=grid*2  k=lanes(4)"


def test_a_row_beyond_the_registers_is_a_loop_of_tiles() -> None:
    found = plan(rows(1000, 40000))
    assert bindings(found) == "m=grid  k=loop*4096 in 8"
    assert found.warps == 4


def test_a_program_that_is_alone_loads_more_of_a_row() -> None:
    found = plan(rows(100, 40000))
    assert bindings(found) == "m=grid  k=loop*16384 in 8"
    assert found.warps == 16


def test_rows_that_begin_at_odd_addresses_are_folded_from_fewer_parts() -> None:
    assert bindings(plan(rows(1000, 40001))) == "m=grid  k=loop*2048 in 4"


def test_looped_rows_find_a_maximum_and_sums_that_refer_to_it_in_one_sweep() -> None:
    assert plan(rows(100, 40000)).online and not plan(rows(100, 4096)).online


def test_a_row_in_short_parts_is_lanes_as_a_whole() -> None:
    found = plan(split_rows(64, 256, 16))
    assert bindings(found) == "m=grid  p=lanes(256)  c=lanes(16)"
    assert found.warps == 4


def test_a_channel_of_many_small_images_is_loaded_once() -> None:
    assert bindings(plan(split_rows(64, 256, 49))) == "m=grid  p=lanes(256)  c=lanes(64)"
    assert bindings(plan(split_rows(64, 1024, 49))) == "m=grid  p=loop*64  c=lanes(64)"


def test_long_parts_of_a_row_are_a_loop_of_4096_elements_an_iteration() -> None:
    assert bindings(plan(split_rows(512, 256, 1024))) == "m=grid  p=loop*4  c=lanes(1024)"
    assert bindings(plan(split_rows(512, 256, 4096))) == "m=grid  p=loop  c=lanes(4096)"


def test_few_programs_load_twice_as_many_rows_ahead() -> None:
    found = plan(split_rows(264, 32, 1024))
    assert bindings(found) == "m=grid  p=loop*8  c=lanes(1024)"
    assert found.stages == 2


@pytest.mark.parametrize(("programs", "parts"), [(265, 32), (264, 24)])
def test_many_programs_and_short_loops_load_nothing_ahead(programs: int, parts: int) -> None:
    found = plan(split_rows(programs, parts, 1024))
    assert bindings(found) == "m=grid  p=loop*4  c=lanes(1024)"
    assert found.stages == 1


def test_a_wide_row_of_more_than_an_iteration_loads_nothing_ahead() -> None:
    """8192 elements of x and its gradient, in f32, spilled."""
    shapes = ((8192, 1), (4096, 2), (8192, 2))
    found = [plan(split_rows(256, 32, width, tensors)).stages for width, tensors in shapes]
    assert found == [2, 2, 1]


def test_short_rows_loaded_one_by_one_have_half_as_many_elements_a_thread() -> None:
    found = plan(split_rows(512, 256, 169))
    assert bindings(found) == "m=grid  p=loop*8  c=lanes(256)"
    few = plan(split_rows(64, 256, 169))
    assert bindings(few) == "m=grid  p=loop*16  c=lanes(256)"
    assert found.warps == few.warps == 16


@pytest.mark.parametrize(
    ("programs", "width", "tensors", "height", "warps"),
    [(1056, 49, 1, 16, 4), (1056, 49, 2, 16, 4), (264, 49, 2, 64, 8), (264, 729, 2, 4, 8)],
)
def test_rows_loaded_one_by_one_have_8_or_16_elements_a_thread(
    programs: int, width: int, tensors: int, height: int, warps: int
) -> None:
    found = plan(split_rows(programs, 1024, width, tensors))
    lanes = power_of_two(width)
    assert bindings(found) == f"m=grid  p=loop*{height}  c=lanes({lanes})"
    assert found.warps == warps


def test_parts_loaded_one_by_one_and_kept_have_up_to_8_warps() -> None:
    assert plan(split_rows(512, 256, 49)).warps == 8
    assert plan(split_rows(512, 128, 52)).warps == 8
    assert plan(split_rows(512, 64, 196)).warps == 16


def test_rows_of_vectors_are_swept_over_again_where_one_program_would_fill_the_registers() -> None:
    """Rows of 49 elements are loaded one by one, and kept; of 52, by fours."""
    assert bindings(plan(split_rows(512, 256, 49))) == "m=grid  p=lanes(256)  c=lanes(64)"
    assert bindings(plan(split_rows(512, 256, 52))) == "m=grid  p=loop*64  c=lanes(64)"
    assert bindings(plan(split_rows(512, 128, 52))) == "m=grid  p=lanes(128)  c=lanes(64)"


def test_a_row_of_unknown_length_is_a_loop_whatever_its_hint() -> None:
    n = Size("N", 512)
    assert bindings(plan(rows(Size("M", 8), n))) == "m=grid  k=loop*512"
    assert not is_resident(Axis("c", index(n)), TUNING)


def test_residence_is_decided_by_the_padded_row() -> None:
    assert is_resident(Axis("c", index(32768)), TUNING)
    assert not is_resident(Axis("c", index(32769)), TUNING)
    assert not is_resident(Axis("c", index(64), limit=index(Size("N", 40))), TUNING)


@pytest.mark.parametrize(
    ("width", "height", "warps", "stages"),
    [
        *((64, 64, 4, 4), (1032, 2, 8, 4), (2048, 2, 8, 4)),
        *((4096, 1, 8, 4), (8192, 1, 16, 3), (16384, 1, 16, 2)),
    ],
)
def test_rows_beside_column_sums_share_an_iteration_and_are_loaded_ahead(
    width: int, height: int, warps: int, stages: int
) -> None:
    found = plan(rows_and_columns(8, 64, width))
    loop = "loop" if height == 1 else f"loop*{height}"
    lanes = 1 << (width - 1).bit_length()
    assert bindings(found) == f"p=grid  i={loop}  k=lanes({lanes})"
    assert (found.warps, found.stages) == (warps, stages)


@pytest.mark.parametrize(
    ("width", "height", "fold"), [(384, 8, 4), (512, 8, 4), (768, 4, 8), (1024, 4, 8)]
)
def test_a_warp_has_a_short_row_beside_column_sums_alone(
    width: int, height: int, fold: int
) -> None:
    """It sums it without a barrier; nothing is loaded ahead, for no other warp waits with it."""
    found = plan(rows_and_columns(8, 64, width))
    lanes = 1 << (width - 1).bit_length()
    assert bindings(found) == f"p=grid  i=loop*{height}  k=lanes({lanes}) in {fold}"
    assert (found.warps, found.stages) == (4, 1)


@pytest.mark.parametrize(
    ("width", "height", "lanes", "warps"),
    [
        (768, 4, "256) in 2", 4),
        (1536, 2, "512)", 8),
        (3072, 1, "1024)", 8),
        (5120, 1, "1024)", 8),
        (12288, 1, "4096)", 16),
        (16384, 1, "4096)", 16),
    ],
)
def test_parts_of_a_row_beside_column_sums_keep_all_lanes_busy(
    width: int, height: int, lanes: str, warps: int
) -> None:
    kernel = unroll_parts(FlatKernel(rows_and_columns(8, 64, width, monoid=SUM)), HOPPER_MACHINE)
    found = plan(kernel)
    loop = "loop" if height == 1 else f"loop*{height}"
    assert bindings(found) == f"p=grid  i={loop}  k=lanes({lanes}"
    assert found.warps == warps


def test_few_rows_a_part_are_one_iteration_of_few_warps() -> None:
    found = plan(rows_and_columns(64, 8, 64))
    assert bindings(found) == "p=grid  i=loop*8  k=lanes(64)"
    assert found.warps == 1


def test_weights_of_the_longest_rows_are_loaded_again_for_each_row() -> None:
    assert plan(rows_and_columns(8, 32, 16384)).reloads
    assert not plan(rows_and_columns(8, 32, 8192)).reloads


def test_a_ragged_last_part_changes_the_bounds_not_the_plan() -> None:
    even, ragged = rows_and_columns(8, 32, 768), rows_and_columns(8, 32, 768, limit=250)
    assert bindings(plan(even)) == bindings(plan(ragged))


def test_column_sums_beside_rows_that_must_be_looped_are_refused() -> None:
    """The sums of all columns would have to stay somewhere while the row's tiles go by."""
    assert accepts_gpu(rows_and_columns(4, 8, 16384), HOPPER_MACHINE)
    assert not accepts_gpu(rows_and_columns(4, 8, 32769), HOPPER_MACHINE)
    assert accepts_gpu(rows(4, 40000), HOPPER_MACHINE)


def test_very_many_short_rows_are_taken_in_turn() -> None:
    chosen, one, shared = rowwise.plans(rows(65536, 768, BF16), HOPPER_MACHINE)
    assert bindings(chosen) == "m=grid by 4  k=lanes(1024)"
    assert bindings(one) == "m=grid  k=lanes(1024)" and not one.reloads
    assert bindings(shared) == "m=grid*4  k=lanes(1024)"
    assert (chosen.warps, one.warps, shared.warps) == (1, 1, 4)
    assert chosen.reloads, "weights of all rows would take the registers of a third of the warps"


@pytest.mark.parametrize(("count", "turns"), [(16384, 1), (33792, 4), (1 << 20, 4)])
def test_rows_are_taken_in_turn_where_two_waves_of_programs_are_left(
    count: int, turns: int
) -> None:
    chosen, *_ = rowwise.plans(rows(count, 768, BF16), HOPPER_MACHINE)
    by = f" by {turns}" if turns > 1 else ""
    assert bindings(chosen) == f"m=grid{by}  k=lanes(1024)"


def test_rows_of_two_warps_are_enough_for_a_program() -> None:
    assert len(rowwise.plans(rows(65536, 2048, BF16), HOPPER_MACHINE)) == 1
