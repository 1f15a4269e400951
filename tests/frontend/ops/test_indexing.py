"""Gathers and tensors put together from parts, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusec.ir.graph import Extern
from tests.frontend.tracing import body, check
from tests.support import BACKEND, values

X = torch.arange(4.0 * 6 * 5).view(4, 6, 5)
ROWS = torch.tensor([3, 0, -1, 2])

PARTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "cat": lambda x: torch.cat([x, x[:, :2] * 2, x[:, 3:]], 1),
    "cat of types": lambda x: torch.cat([x.int(), x.bool(), x], -1),
    "cat of computed": lambda x: torch.cat([x.flip(0), torch.arange(5.0).expand(4, 6, 5)]),
    "stack": lambda x: torch.stack([x, x + 1, x.flip(1)], 2),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=7.0),
    "crop": lambda x: F.pad(x, (-1, 2, -2, -1)),
    "roll": lambda x: x.roll((1, -2), (0, 2)),
    "repeat": lambda x: x.repeat(2, 1, 3, 1),
    "tril": lambda x: (x.tril(), x.triu(1), x.tril(-2)),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :2] * 9, 1, 1, 4, 2),
    "select_scatter": lambda x: x.select_scatter(x[:, 0] * 9, 1, -2),
    "diagonal_scatter": lambda x: (
        x.diagonal_scatter(x[:, 0, :4] * 9, 1, 0, 1)
        if x.dim() == 2
        else x[0].diagonal_scatter(x[1, 0, :4] * 9, 1)
    ),
    "one hot": lambda x: F.one_hot(x[0, 0].long() % 4, 4),
    "eye": lambda x: torch.eye(4, 6) + x[:, :, 0],
    "arange": lambda x: torch.arange(0, 10, 2) + torch.arange(0, 1, 0.2) + x[0, 0],
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_come_together_as_in_eager(name: str) -> None:
    check(PARTS[name], X)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", sorted(set(PARTS) - {"diagonal_scatter", "one hot", "eye", "arange"})
)
def test_parts_of_symbolic_sizes_come_together_as_in_eager(name: str) -> None:
    """A scatter that is returned lies where its argument does, which may be anywhere."""
    check(PARTS[name], X, dynamic=True, externs=int(name.endswith("_scatter")))


GATHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "pairs": lambda x, i: x[i, i + 1],
    "pairs apart": lambda x, i: x[i, :, i],
    "broadcast": lambda x, i: x[i[:, None], i[None, :]],
    "index_select": lambda x, i: x.index_select(1, i % 4),
    "gather": lambda x, i: x.gather(1, (i % 4).view(4, 1, 1).expand(4, 2, 5)),
    "embedding": lambda x, i: F.embedding(i % 4, x[0]),
    "int32": lambda x, i: x[i.int()],
    "of computed": lambda x, i: (x * 2)[i + 0],
}


@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_reads_what_eager_reads(name: str) -> None:
    check(GATHERS[name], X, ROWS)


def test_an_index_without_axes_is_read_by_the_kernel() -> None:
    check(lambda x, i: x.take(i), torch.randn(4, 6), torch.tensor(-5))


def test_negative_indices_count_from_the_end() -> None:
    assert body(check(lambda x, i: x[i], X[:, 0, 0].clone(), ROWS))[0] == (
        "index[i0] = x_1[[where(i_1[i0] < 0, i_1[i0] + 4, i_1[i0])]]"
    )


def test_a_mask_as_an_index_is_a_selection_where_all_get_the_same() -> None:
    x = torch.arange(12.0).reshape(4, 3)
    mask = ROWS > 0
    check(lambda x, m: x.index_put((m,), torch.tensor(9.0)), x[:, 0].clone(), mask)
    check(lambda x, m: x.index_put((m,), x[:1] * 2, accumulate=True), x, mask)
    check(lambda x, m: x.index_put((x > m[:, None],), x[0, :1]), x, mask)


def test_a_mask_as_an_index_is_left_to_eager_where_each_gets_its_own() -> None:
    graph = check(lambda x, m: x.index_put((m,), x[:2]), torch.arange(4.0), ROWS > 0, externs=1)
    (line,) = (n for n in graph.nodes if isinstance(n, Extern))
    assert line.reason == "a mask as an index: which source goes where depends on data"


def test_a_scatter_of_one_element_a_line_is_a_selection() -> None:
    index = torch.tensor([[1], [0], [3]])
    graph = check(lambda x, i: x.scatter(1, i, -1.0), torch.zeros(3, 4), index)
    assert body(graph)[0] == (
        "scatter[i0, i1] = where((i1):i64 == within(i_1[i0, 0], 4), -1.0, x_1[i0, i1])"
    )
    check(lambda x, i: x.scatter_add(1, i, x[:, :1] + 1), torch.ones(3, 4), index)
    check(lambda x, i: x.scatter(1, i, x[:, :1] + 1), torch.ones(3, 4), index)


def test_a_scatter_whose_elements_may_collide_looks_through_its_sources() -> None:
    index = torch.tensor([[1, 1], [0, 2], [3, 3]])
    graph = check(lambda x, i: x.scatter_add(1, i, x[:, :2] + 1), torch.ones(3, 4), index)
    assert body(graph)[-2] == (
        "scatter_add[i0, i1] = "
        "x_1[i0, i1] + sum(j0: where((i1):i64 == within(i_1[i0, j0], 4), add[i0, j0], 0.0))"
    )


def test_many_sources_are_combined_by_a_loop_over_them_and_few_replace_in_eager() -> None:
    long = torch.zeros(300, dtype=torch.int64)
    graph = check(lambda x, i: x.scatter_add(0, i, x), torch.ones(300), long)
    assert any("hits(" in line for line in body(graph))
    check(lambda x, i: x.scatter(0, i, x), torch.ones(400), long, externs=1)
    graph = check(lambda x, i: x.scatter(0, i, x), torch.ones(300), long)
    assert any("scatter_max" in line and "hits(" in line for line in body(graph))


PADS = (
    ("reflect", (2, 3, 5, 7), (2, 1, 3, 4)),
    ("reflect", (2, 3, 9), (3, 0)),
    ("reflect", (1, 2, 4, 5, 6), (1, 2, 0, 3, 2, 1)),
    ("reflect", (2, 3, 5, 7), (-1, 2, 3, -2)),
    ("replicate", (2, 3, 5, 7), (2, 9, 3, 4)),
    ("replicate", (3, 4, 5, 6), (1, 2, 0, 3, 2, 1)),
    ("replicate", (2, 3, 5, 7), (-1, 2, -2, 1)),
)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("pad", PADS, ids=lambda pad: f"{pad[0]} {pad[2]}")
def test_where_no_library_may_be_called_a_pad_reads_what_is_inside(pad, dynamic: bool) -> None:
    mode, shape, widths = pad
    torch._dynamo.reset()
    options = {"native": True, "strict": True, "verify": True}
    fn = lambda x: torch.relu(F.pad(x, widths, mode)) * 2  # noqa: E731
    compiled = torch.compile(fn, backend=BACKEND, options=options)
    for more in (0, 1, 3) if dynamic else (0,):
        x = values(*(extent + more for extent in shape), seed=more)
        for axis in range(x.ndim if dynamic else 0):
            torch._dynamo.mark_dynamic(x, axis)
        assert torch.equal(compiled(x), fn(x))


def test_a_cat_guards_its_loads() -> None:
    graph = check(lambda x, y: torch.cat([x, y]), torch.ones(3), torch.zeros(5))
    assert body(graph)[0] == (
        "cat[i0] = where((i0):i64 < (3):i64, x_1[i0] if ((i0):i64 < (3):i64), "
        "y_1[i0 - 3] if ((i0):i64 >= (3):i64))"
    )
