"""Strides of dense tensors."""

from __future__ import annotations

from fusec.ir.dtype import F32
from fusec.ir.expr import Buffer
from fusec.ir.index import Size, index
from fusec.ir.strides import contiguous_strides

N, M = Size("N", 5), Size("M", 3)


def test_contiguous_strides_are_row_major() -> None:
    assert contiguous_strides((index(N), index(4), index(M))) == (index(M) * 4, index(M), index(1))


def test_a_buffer_knows_whether_its_strides_are_row_major() -> None:
    shape, across = (index(N), index(M)), (index(1), index(N))
    assert Buffer.row_major("x", shape, F32).is_row_major
    assert not Buffer("x", shape, across, F32).is_row_major
