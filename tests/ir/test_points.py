"""Proofs by trial that an index is in range, where bounds of its terms prove nothing."""

from __future__ import annotations

import pytest

from fusec.ir.atoms import Runtime, Size
from fusec.ir.index import Axis, Index, index, is_in_range
from fusec.ir.points import POINTS_TRIED, is_in_range_as_traced, is_in_range_everywhere
from tests.ir.graphs import buffer, load

I = index(Axis("i", index(6)))  # noqa: E741
LONG = index(Axis("j", index(POINTS_TRIED + 1)))
UNKNOWN = index(Axis("k", index(Size("n", 6))))
ROW = Axis("r", index(4))
READ = index(Runtime(load(buffer("p", 6), I), index(6)))
RAGGED = index(Axis("c", index(4), limit=index(4) - ROW))


@pytest.mark.parametrize(
    ("value", "extent"),
    [
        (I // 2 - I // 3, 2),
        (I % 4 - (I % 4) // 2, 3),
        (RAGGED + ROW, 4),
        (READ // 2 - READ // 3 + I - I // 2, 5),
    ],
    ids=["quotients", "remainders", "below a limit", "of what is read"],
)
def test_the_greatest_value_is_found_at_the_points(value: Index, extent: int) -> None:
    assert is_in_range_everywhere(value, index(extent))
    assert not is_in_range_everywhere(value, index(extent - 1))
    assert not is_in_range_everywhere(value - 1, index(extent))


def test_bounds_of_single_terms_do_not_prove_it() -> None:
    assert not is_in_range(I // 2 - I // 3, index(2))


@pytest.mark.parametrize(
    "value",
    [LONG, UNKNOWN, index(Runtime(load(buffer("p", 6), I), UNKNOWN + 1)), I // Size("n", 6)],
    ids=["many points", "an extent by size", "a gather by size", "a divisor by size"],
)
def test_what_has_no_small_constant_domain_is_not_tried(value: Index) -> None:
    assert not is_in_range_everywhere(value, index(1 << 20))


N, M = Size("n", 6), Size("m", 9)
SOME = Axis("s", index(N))
READ_BY_SIZE = index(Runtime(load(buffer("p", 6), I), index(N)))


@pytest.mark.parametrize(
    ("value", "extent"),
    [
        (index(SOME), index(M) - 3),
        (index(SOME) // (index(N) - 4) - index(SOME) // 3, index(M) // 3 - 1),
        (index(SOME) % (index(N) - 2), index(M) - 5),
        (index(Axis("c", index(M), limit=index(M) - 3 - SOME)) + SOME, index(N)),
        (READ_BY_SIZE, index(M) - 3),
    ],
    ids=["extent", "quotients", "remainder", "limit", "gather"],
)
def test_sizes_have_their_traced_values(value: Index, extent: Index) -> None:
    assert not is_in_range(value, extent)
    assert not is_in_range_everywhere(value, extent)
    assert is_in_range_as_traced(value, extent)
    assert not is_in_range_as_traced(value, extent - 1)
    assert not is_in_range_as_traced(value - 1, extent)
