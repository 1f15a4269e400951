"""Products of few rows, told from their sums."""

from __future__ import annotations

import pytest

from fusec.ir.dtype import BF16, F32, I64, DType
from fusec.ir.expr import Cast, Expr, Op, Reduce
from fusec.ir.index import Axis, IntoIndex, Runtime, Size, floordiv, index, mod
from fusec.ir.monoid import MAX, SUM
from fusec.ir.streamed import match_panels, match_skinny
from tests.ir.graphs import axes, buffer, load

MOST = 8


def product(rows: IntoIndex, columns: IntoIndex, *, along: str = "k") -> tuple[Reduce, list[Axis]]:
    """sum(k: x[m, k] * w[n, k]), with weights that are contiguous along n or k."""
    m, n, k = axes("m n k", rows, columns, 32)
    x = buffer("x", rows, 32)
    w = buffer("w", columns, 32) if along == "k" else buffer("w", 32, columns)
    weights = load(w, n, k) if along == "k" else load(w, k, n)
    return Reduce(SUM, (k,), Op("mul", (load(x, m, k), weights))), [m, n, k]


@pytest.mark.parametrize("swapped", [False, True])
def test_the_factor_with_few_rows_may_stand_on_either_side(swapped: bool) -> None:
    node, (m, n, k) = product(4, 64)
    if swapped:
        a, b = node.body.args  # type: ignore[attr-defined]
        node = Reduce(SUM, (k,), Op("mul", (b, a)))
    found = match_skinny(node, MOST)
    assert found is not None
    assert (found.rows, found.columns) == ((m,), (n,))
    assert found.few.axes == {m, k}


def test_a_vector_is_no_rows() -> None:
    n, k = axes("n k", 64, 32)
    x, w = buffer("x", 32, dtype=BF16), buffer("w", 64, 32, dtype=BF16)
    wide: list[Expr] = [Cast(load(x, k), F32), Cast(load(w, n, k), F32)]
    found = match_skinny(Reduce(SUM, (k,), Op("mul", tuple(wide))), MOST)
    assert found is not None
    assert (found.rows, found.columns) == ((), (n,))


@pytest.mark.parametrize(
    ("rows", "columns", "along"),
    [(9, 64, "k"), (4, 64, "n"), (4, 4, "k"), (index(Size("s0", 4)), 64, "k")],
    ids=["many rows", "weights along columns", "no more columns than rows", "rows of any number"],
)
def test_other_products_stream_nothing(rows: IntoIndex, columns: IntoIndex, along: str) -> None:
    assert match_skinny(product(rows, columns, along=along)[0], MOST) is None


def test_weights_chosen_by_a_number_that_is_read_are_streamed_for_each_choice() -> None:
    b, m, n, k = axes("b m n k", 6, 4, 64, 32)
    which = load(buffer("which", 6, dtype=I64), b)
    x, w = buffer("x", 6, 4, 32), buffer("w", 5, 64, 32)
    chosen = index(Runtime(which, index(5)))
    node = Reduce(SUM, (k,), Op("mul", (load(x, b, m, k), load(w, chosen, n, k))))
    found = match_skinny(node, MOST)
    assert found is not None
    assert (found.batch, found.rows, found.columns) == ((b,), (m,), (n,))
    for at in (index(b), floordiv(index(b), index(2))):  # an attention's, and one of shared heads
        plain = Op("mul", (load(x, b, m, k), load(buffer("v", 6, 64, 32), at, n, k)))
        assert match_skinny(Reduce(SUM, (k,), plain), MOST) is None


@pytest.mark.parametrize(("columns", "panel"), [(192, 192), (64, 0)])
def test_a_matrix_that_is_chosen_is_one_panel_if_it_is_wide(columns: int, panel: int) -> None:
    b, m, n, k = axes("b m n k", 6, 4, columns, 32)
    chosen = index(Runtime(load(buffer("which", 6, dtype=I64), b), index(5)))
    x, w = buffer("x", 6, 4, 32), buffer("w", 5, 32, columns)
    node = Reduce(SUM, (k,), Op("mul", (load(x, b, m, k), load(w, chosen, k, n))))
    found = match_skinny(node, MOST)
    assert (found.panel if found else 0) == panel
    assert found is None or (found.batch, found.rows, found.columns) == ((b,), (m,), (n,))


def panels(columns: int, width: int, dtype: DType = F32) -> tuple[Reduce, list[Axis]]:
    """sum(k: x[m, k] * w[n // width, k, n % width])."""
    m, n, k = axes("m n k", 4, columns, 32)
    x, w = buffer("x", 4, 32), buffer("w", columns // width, 32, width, dtype=dtype)
    weight: Expr = load(w, floordiv(index(n), index(width)), k, mod(index(n), index(width)))
    weight = weight if dtype is F32 else Cast(weight, F32)
    return Reduce(SUM, (k,), Op("mul", (load(x, m, k), weight))), [m, n, k]


@pytest.mark.parametrize(("dtype", "size"), [(F32, 4), (BF16, 2)])
@pytest.mark.parametrize("cut", [False, True])
def test_weights_may_lie_in_panels(dtype: DType, size: int, cut: bool) -> None:
    """Whether or not their columns were cut in panels and places."""
    node, (m, n, _) = panels(64, 32, dtype)
    columns: tuple[Axis, ...] = (n,)
    if cut:
        columns = axes("p c", 2, 32)
        made = node.substitute({n: index(columns[0]) * 32 + index(columns[1])})
        assert isinstance(made, Reduce)
        node = made
    found = match_skinny(node, MOST)
    assert found is not None
    assert (found.rows, found.columns) == ((m,), columns)
    assert (found.panel, found.itemsize) == (32, size)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_of_panels_has_any_number_of_rows(swapped: bool) -> None:
    node, (m, _, k) = panels(64, 32)
    many = Axis("m", index(Size("s0", 4)))
    node = node.substitute({m: index(many)})  # type: ignore[assignment]
    if swapped:
        a, b = node.body.args  # type: ignore[attr-defined]
        node = Reduce(SUM, (k,), Op("mul", (b, a)))
    found = match_panels(node, 32)
    assert found is not None and found.few.axes == {many, k}
    assert (found.rows, found.panel) == ((many,), 32)


def test_the_last_panel_may_be_padded_unless_rows_are_few() -> None:
    node, (_, n, _) = panels(64, 32)
    short = Axis("n", index(47))
    ragged = node.substitute({n: index(short)})
    found = match_panels(ragged, 32)
    assert found is not None and (found.columns, found.panel) == ((short,), 32)
    assert match_skinny(ragged, MOST) is None


def test_other_products_have_no_panels() -> None:
    assert match_panels(panels(48, 16)[0], 32) is None
    assert match_panels(product(4, 64)[0], 32) is None
    assert match_panels(product(4, 64, along="n")[0], 32) is None


@pytest.mark.parametrize(("columns", "width"), [(32, 32), (512, 256)])
def test_one_panel_or_a_wide_one_is_a_matrix_by_rows(columns: int, width: int) -> None:
    assert match_skinny(panels(columns, width)[0], MOST) is None


def test_few_rows_that_are_a_step_apart_would_be_gathered() -> None:
    m, n, k = axes("m n k", 4, 64, 32)
    x, w = buffer("x", 32, 4), buffer("w", 64, 32)
    body = Op("mul", (load(x, k, m), load(w, n, k)))
    assert match_skinny(Reduce(SUM, (k,), body), MOST) is None


def test_a_batch_of_products_has_weights_of_its_own_for_each() -> None:
    b, m, n, k = axes("b m n k", 3, 4, 64, 32)
    x, w = buffer("x", 3, 4, 32), buffer("w", 3, 64, 32)
    body = Op("mul", (load(x, b, m, k), load(w, b, n, k)))
    assert match_skinny(Reduce(SUM, (k,), body), MOST) is None
    assert match_skinny(Reduce(MAX, (k,), product(4, 64)[0].body), MOST) is None
