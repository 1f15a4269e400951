"""What passes may know of an eager kernel: read off its name, signature and arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fusec.driver.compiler import RECENT
from fusec.frontend.effects import effect_of
from fusec.frontend.shapes import SizeMap
from fusec.ir.dtype import F32, F64, NumberForm
from fusec.ir.expr import Buffer
from fusec.ir.extern import (
    CopyInto,
    Effect,
    Fresh,
    Linear,
    Pending,
    Product,
    Scatter,
    Unknown,
    Window,
    WindowUpdate,
)
from fusec.ir.graph import Argument, SizeValue
from fusec.ir.index import Size, index
from tests.ir.graphs import buffer, whole

aten = torch.ops.aten
X, PART, ROW = (whole(buffer(n, *s)) for n, s in (("x", (4, 6)), ("p", (4, 2)), ("r", (4,))))
PLACES = whole(buffer("i", 3))
P = Size("P", 1)
LINEAR = (Linear("oneDNN", "mkldnn._linear_pointwise.default", ("none", (), "")),)


def window(axis: int, start: object, step: int | None) -> WindowUpdate:
    found = Window(axis, index(start), None if step is None else index(step))
    return WindowUpdate(found, "aten.copy_.default")


def update(in_place: str, moved: int) -> Scatter:
    return Scatter(f"aten.{in_place}", index(moved))


PUT = aten._unsafe_index_put.default


@pytest.mark.parametrize(
    ("target", "args", "effect"),
    [
        (aten.mm.default, (X, X), Product("aten.addmm.default", "aten.addmm_.default", LINEAR)),
        (aten.bmm.default, (X, X), Fresh()),
        (aten.convolution_backward.default, (X, X), Fresh()),
        (aten.copy_.default, (X, PART), CopyInto()),
        (aten.sort.default, (X,), Unknown()),
        (aten.slice_scatter.default, (X, PART, 1, 2, 4), window(1, 2, 1)),
        (aten.slice_scatter.default, (X, PART, -1, -2, None, 3), window(1, 4, 3)),
        (aten.slice_scatter.default, (X, PART, 1, -9, 2), window(1, 0, 1)),
        (aten.select_scatter.default, (X, ROW, 1, SizeValue(index(P))), window(1, P, None)),
        (aten.scatter.src, (X, 0, PLACES, PLACES), update("scatter_.src", 3)),
        (aten.scatter_add.default, (X, 0, PLACES, PLACES), update("scatter_add_.default", 6)),
        (aten.index_copy.default, (X, 0, PLACES, PART), update("index_copy_.default", 8)),
        (aten.index_put.default, (X, (PLACES,), ROW), update("index_put_.default", 18)),
        (PUT, (X, (None, PLACES), ROW, True), update("index_put_.default", 24)),
    ],
    ids=lambda value: type(value).__name__ if not callable(value) else str(value),
)  # fmt: skip
def test_effect(target: object, args: tuple[Argument, ...], effect: Effect) -> None:
    assert effect_of(target, args, (), SizeMap()) == effect


def test_complex_tensors_are_written_in_place_where_a_part_has_their_form() -> None:
    z, part = (whole(buffer(n, *s)) for n, s in (("z", (4, 6, 2)), ("part", (4, 2, 2))))
    whole_z, of_z = (replace(view, form=NumberForm.COMPLEX) for view in (z, part))
    args = (whole_z, of_z, -1, -2)
    assert effect_of(aten.slice_scatter.default, args, (), SizeMap()) == window(1, 4, 1)
    assert (
        effect_of(aten.slice_scatter.default, (whole_z, part, -1, -2), (), SizeMap()) == Unknown()
    )
    bit = replace(whole_z, form=NumberForm.CONJUGATE)
    assert effect_of(aten.index_put.default, (bit, (PLACES,), of_z), (), SizeMap()) == Unknown()
    assert effect_of(aten.copy_.default, (bit, of_z), (), SizeMap()) == CopyInto()
    assert effect_of(aten.mm.default, (whole_z, whole_z), (), SizeMap()) == Fresh()


def test_libraries_multiply_what_has_their_types() -> None:
    doubles = whole(Buffer("d", X.shape, X.strides, F64))
    assert effect_of(aten.mm.default, (doubles, doubles), (), SizeMap()).linear == ()
    assert effect_of(aten.mm.default, (X, doubles), (), SizeMap()).linear == ()


@pytest.mark.parametrize(
    ("shape", "strides", "offered"),
    [
        ((6, 8), (8, 1), True),
        ((6, 8), (1, 6), True),
        ((6, 8), (16, 1), False),
        ((6, 8), (1, 12), False),
        ((1, 8), (99, 1), True),
        ((1, 8), (99, 2), False),
        ((1, 8), (1, 5), False),
        ((6, 1), (1, 99), True),
    ],
)
def test_onednn_multiplies_by_what_has_no_gaps(
    shape: tuple[int, int], strides: tuple[int, int], offered: bool
) -> None:
    weight = Buffer("w", tuple(map(index, shape)), tuple(map(index, strides)), F32)
    rows = whole(buffer("a", 4, shape[0]))
    assert (
        effect_of(aten.mm.default, (rows, whole(weight)), (), SizeMap()).linear == LINEAR * offered
    )


def test_onednn_is_offered_for_types_that_it_multiplies() -> None:
    wide = whole(buffer("wide", 4, 4, dtype=F64))
    assert effect_of(aten.mm.default, (wide, wide), (), SizeMap()).linear == ()


def test_what_ranks_send_is_pending_until_it_was_waited_for() -> None:
    ops = torch.ops._c10d_functional
    assert effect_of(ops.all_reduce.default, (X, "sum", "0"), (), SizeMap()) == Pending()
    assert effect_of(ops.wait_tensor.default, (X,), (), SizeMap()) == Unknown()


def test_a_window_says_where_a_part_lies() -> None:
    x: Buffer = X.buffer
    rows = Window(0, index(1), index(2))
    i, j = index(P), index(3)
    assert rows.indices((i, j)) == (index(P) * 2 + 1, j)
    view = rows.view(x, (index(2), index(6)))
    assert (view.strides, view.offset) == ((index(12), index(1)), index(6))
    column = Window(1, index(5), None)
    assert column.indices((i,)) == (i, index(5))
    assert column.view(x, (index(4),)).strides == (index(6),)


def test_rows_of_a_table_are_normed_where_they_lie() -> None:
    """``max_norm`` changes the rows that are looked up: no copy of the table."""
    tables = [nn.Embedding(100, 8, max_norm=0.5).requires_grad_(False) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    rows = torch.tensor([[3, 4, 3], [99, 0, 7]])
    call = torch.compile(lambda i: tables[1](i) * 2, backend="fusec", options={"strict": True})
    for _ in range(2):
        torch.testing.assert_close(call(rows), tables[0](rows) * 2)
        torch.testing.assert_close(tables[1].weight, tables[0].weight)
    assert "embedding_renorm_" in RECENT[-1].wrapper and "copy_" not in RECENT[-1].wrapper
