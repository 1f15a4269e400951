"""Bounds of sizes that are at most others, or the least of two."""

from __future__ import annotations

import pytest

from fusec.ir.atoms import Minimum, size_class
from fusec.ir.index import Axis, Size, index, is_in_range, is_nonnegative

U = Size("u", 1024, 0, None)
ROWS = index(U)
ONE = index(Minimum("min_0", 1, 0, 1, (index(1), ROWS)))
FEW = index(Minimum("min_1", 3, 0, 3, (index(3), ROWS)))


def test_a_window_from_the_second_row_on_is_in_range() -> None:
    i = index(Axis("i", ROWS - ONE))
    assert is_in_range(i, ROWS)
    assert is_in_range(i + ONE, ROWS)
    assert not is_in_range(i + 1, ROWS)


def test_axes_that_were_merged_keep_it_too() -> None:
    flat = index(Axis("flat", (ROWS - ONE) * 4))
    assert is_in_range(flat + 4 * ONE, ROWS * 4)
    assert not is_in_range(flat + 4 * ONE + 1, ROWS * 4)


def test_the_least_of_two_is_at_most_either_and_is_one_of_them() -> None:
    assert is_nonnegative(ROWS - FEW)
    assert is_nonnegative(3 - FEW)
    assert not is_nonnegative(FEW - 1)
    wide = index(Minimum("min_2", 5, 5, None, (ROWS + 5, index(9))))
    assert is_nonnegative(wide - 5)
    assert not is_nonnegative(wide - 6)


def test_a_least_of_a_least_bounds_what_lies_between() -> None:
    both = index(Minimum("min_3", 2, 0, None, (2 * ONE, ROWS)))
    i = index(Axis("i", ROWS - both))
    assert is_in_range(i + ONE, ROWS)
    assert not is_in_range(i + both + ONE, ROWS)


def test_a_size_that_is_at_most_another_reads_inside_of_it() -> None:
    part = Size("v", 1024, 0, None, (ROWS,))
    rest = Size("w", 1024, 0, None, (ROWS - index(part),))
    i, j = index(Axis("i", index(part))), index(Axis("j", index(rest)))
    assert is_in_range(i, ROWS)
    assert is_in_range(j + index(part), ROWS)
    assert not is_in_range(i + 1, ROWS)
    assert not is_in_range(j, index(part))


def test_half_of_a_size_is_in_range_of_it() -> None:
    half = ROWS // 2
    i, flat = index(Axis("i", half)), index(Axis("flat", half * 4))
    assert is_in_range(i, ROWS)
    assert is_in_range(flat // 4, half)
    assert not is_in_range(i + 1, half)


@pytest.mark.parametrize(
    ("hint", "of"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (100, 128), (129, 256)]
)
def test_sizes_of_one_class_are_within_a_factor_of_two(hint: int, of: int) -> None:
    assert size_class(hint) == of
