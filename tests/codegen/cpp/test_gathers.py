"""Indices that a loop reads elements at, checked before it where no iteration changes them."""

from __future__ import annotations

import pytest
import torch

import fusec
from fusec.codegen.cpp.gathers import steady_gathers
from fusec.errors import IndexOutOfRange
from fusec.ir.dtype import BOOL, F32, I64
from fusec.ir.expr import Buffer, Load, Var
from fusec.ir.index import Axis, Index, IntoIndex, Runtime, Size, index
from fusec.ir.program import For, Let, Statement
from tests.support import BACKEND, compile_with, values

LANE, ROW = Axis("lane", index(8)), Axis("m", index(4))
PLACE, GUARD = Var("place", I64, frozenset({ROW})), Var("wanted", BOOL, frozenset({ROW}))
TABLE = Buffer("x", (index(1 << 12),), (index(1),), F32)


def loop(*body: Statement) -> For:
    return For(Axis("k", index(64)), index(0), (index(64),), body)


def read(place: Var, extent: IntoIndex = 100, guard: Var | None = None) -> Let:
    """A load of ``x[8*place + lane]``."""
    at: Index = 8 * index(Runtime(place, index(extent))) + index(LANE)
    return Let(Var("v", F32, frozenset({LANE, ROW})), Load(TABLE, (at,), guard))


def test_an_index_named_before_a_loop_is_checked_before_it_once() -> None:
    assert steady_gathers(loop(read(PLACE), read(PLACE)), LANE) == [Runtime(PLACE, index(100))]
    assert steady_gathers(loop(loop(read(PLACE))), LANE) == [Runtime(PLACE, index(100))]


def test_what_a_loop_computes_reads_or_may_skip_is_checked_in_it() -> None:
    own = Let(PLACE, Load(Buffer("p", (index(4),), (index(1),), I64), (index(ROW),), None))
    of_lanes = Var("place", I64, frozenset({LANE}))
    assert steady_gathers(loop(own, read(PLACE)), LANE) == []
    assert steady_gathers(loop(read(of_lanes)), LANE) == []
    assert steady_gathers(loop(read(PLACE, guard=GUARD)), LANE) == []


def test_an_axis_that_may_be_empty_has_no_element_to_read_instead() -> None:
    assert steady_gathers(loop(read(PLACE, index(Size("n", 8, 0)))), LANE) == []
    assert len(steady_gathers(loop(read(PLACE, index(Size("n", 8, 1)))), LANE)) == 1


def rows(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return table[places] * 2 + 1


@pytest.mark.skipif(BACKEND != "fusec", reason="reads C++")
def test_the_loop_over_a_row_has_no_check() -> None:
    places = torch.tensor([3, 0, 4])
    (kernel,) = fusec.kernels(rows, values(5, 256), places)
    before, _, inner = kernel.source.rpartition("for (")
    assert "fusec_checked" in before
    assert "fusec_checked" not in inner


@pytest.mark.skipif(BACKEND != "fusec", reason="asks what fusec reports")
@pytest.mark.parametrize("wrong", [5, -6])
def test_an_index_out_of_range_is_still_reported(wrong: int) -> None:
    call = compile_with(rows)
    given = values(5, 256)
    torch.testing.assert_close(
        call(given, torch.tensor([-1, 4, 0])), rows(given, torch.tensor([-1, 4, 0]))
    )
    with pytest.raises(IndexOutOfRange):
        call(given, torch.tensor([1, wrong, 2]))
