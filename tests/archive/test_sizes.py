"""Sizes by name: formulas, conditions, and what of JSON is neither."""

from __future__ import annotations

from typing import Any

import pytest

from fusec.archive.sizes import (
    bind_sizes,
    extent,
    holds,
    read_condition,
    read_size,
    shown,
    value,
)
from fusec.errors import UsageError

SIZES = {"B": 5, "T": 7}
FORMULAS = [
    (8, 8, "8"),
    ("T", 7, "T"),
    (["+", ["*", 2, "B"], -1], 9, "2*B + -1"),
    (["*", ["+", "B", "T"], 3], 36, "(B + T)*3"),
    (["//", "T", 2], 3, "T//2"),
    (["%", "T", "B"], 2, "T%B"),
    (["min", "T", 6], 6, "min(T, 6)"),
    (["*", 2, ["min", "T", 6]], 12, "2*min(T, 6)"),
]


@pytest.mark.parametrize("written, expected, text", FORMULAS)
def test_a_formula_is_computed_and_shown(written: Any, expected: int, text: str) -> None:
    size = read_size(written)
    assert (value(size, SIZES), shown(size)) == (expected, text)


def test_a_condition_holds_or_not() -> None:
    condition = read_condition(["or", ["<", "B", 5], ["and", ["==", "T", 7], ["!=", "B", "T"]]])
    assert holds(condition, SIZES)
    assert not holds(condition, {"B": 7, "T": 7})
    assert shown(condition) == "B < 5 or (T == 7 and B != T)"


def test_the_first_tensor_with_a_name_says_its_size() -> None:
    assert bind_sizes([(("B", 8), (3, 8)), (("B", ("*", 2, "T"), "T"), (4, 8, 4))]) == {
        "B": 3,
        "T": 4,
    }


def test_a_division_by_zero_is_an_error() -> None:
    with pytest.raises(UsageError, match="B is 0"):
        value(("//", 8, "B"), {"B": 0})


@pytest.mark.parametrize("size", [("+", "B", -9), ("*", "T", 1 << 62)])
def test_what_no_tensor_has_is_an_error(size: Any) -> None:
    with pytest.raises(UsageError, match="which is no size of a tensor"):
        extent(size, SIZES)


WRONG = (None, True, 1.5, -1, "", "a b", [], ["+"], ["//", 1, 2, 3], ["-", 1, 2], {}, "é")


@pytest.mark.parametrize("found", WRONG)
def test_what_is_no_formula_is_an_error(found: Any) -> None:
    with pytest.raises(ValueError, match="no size"):
        read_size(found)
    with pytest.raises(ValueError, match="no condition"):
        read_condition(found)
