"""Loads and stores of pairs: vectors that are shuffled apart and together."""

from __future__ import annotations

import pytest
import torch

from fusec.codegen.cpp.pairs import half_of_pair, paired_puts
from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer, Load, Var
from fusec.ir.index import Axis, Size, index
from fusec.ir.program import Let, Put, Statement
from tests.support import HALF, check, values

LANE, ROW = Axis("lane", index(16)), Axis("row", index(8))
X, Y = (Buffer(name, (index(512),), (index(1),), F32) for name in "xy")
V = Var("v", F32, frozenset((LANE,)))


def put(offset: int, buffer: Buffer = X, step: int = 2, guard: Var | None = None) -> Put:
    return Put(buffer, index(ROW) * 32 + index(LANE) * step + offset, V, guard)


def read(buffer: Buffer) -> Let:
    return Let(V, Load(buffer, (index(LANE),)))


def found(*body: Statement) -> dict[int, list[int] | None]:
    """Return position -> the positions of the stores that are one there, the lower first."""
    pairs = paired_puts(body, LANE)
    return {at: None if pair is None else [*map(body.index, pair)] for at, pair in pairs.items()}


def test_neighbours_are_stored_together() -> None:
    assert found(put(0), put(1)) == {0: None, 1: [0, 1]}
    assert found(put(1), read(Y), put(0)) == {0: None, 2: [2, 0]}
    several = found(put(0), put(0, Y), put(1, Y), put(1))
    assert several == {0: None, 1: None, 2: [1, 2], 3: [0, 3]}


def test_others_are_stored_one_by_one() -> None:
    mask = Var("m", F32, frozenset((LANE,)))
    assert found(put(0), put(3)) == found(put(1), put(2)) == {}
    assert found(put(0), put(1, Y)) == found(put(0), put(1, guard=mask)) == {}
    assert found(put(0, step=1), put(1, step=1)) == {}
    assert found(put(0), read(X), put(1)) == {}


def test_memory_in_pairs_has_an_even_length_and_begins_with_a_pair() -> None:
    lane, n = index(LANE) * 2, Size("n", 8)
    odd = Buffer("odd", (index(511),), (index(1),), F32)
    rows = Buffer("rows", (index(n), index(7)), (index(7), index(1)), F32)
    pairs = Buffer("pairs", (index(n), index(2)), (index(2), index(1)), F32)
    assert [half_of_pair(X, lane + k, LANE) for k in range(4)] == [0, 1, 0, 1]
    assert half_of_pair(pairs.flat(), lane + 1, LANE) == 1
    assert half_of_pair(odd, lane, LANE) is None
    assert half_of_pair(rows.flat(), lane + index(ROW) * 7, LANE) is None
    assert half_of_pair(X, index(LANE), LANE) is None
    assert half_of_pair(X, lane, None) is None


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, *HALF, torch.int8), ids=str)
@pytest.mark.parametrize("width", (3, 16, 37))
def test_pairs_of_any_type_and_number(dtype: torch.dtype, width: int) -> None:
    def fn(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x[..., 0], x[..., 1]
        return torch.stack([a - b, a + b], -1), torch.stack([b, a.where(mask, b)], -1), a * b

    check(fn, values(5, width, 2, dtype=dtype), values(width, dtype=torch.bool))


def test_odd_elements_of_an_odd_row_are_read_one_by_one() -> None:
    check(lambda x: (x[:, ::2] * 2, x[:, 1::2] + 1), values(5, 37))
