"""Grouped products beside eager: each group of rows has a matrix of its own, as experts do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusec
from tests.support import BACKEND, check, compile_with, externs, values

grouped_mm_fallback = pytest.importorskip("transformers.integrations.moe") and (
    torch.ops.transformers.grouped_mm_fallback
)
FALLBACK = "transformers.grouped_mm_fallback.default"
fusec_alone = pytest.mark.skipif(BACKEND != "fusec", reason="asks what fusec makes and reports")


class Case(NamedTuple):
    x: Tensor
    w: Tensor
    offs: Tensor


def case(counts: list[int], *, rest: int = 0, terms: int = 24, columns: int = 40) -> Case:
    """Return rows in groups of some sizes, and ``rest`` rows that are in no group."""
    offs = torch.tensor(counts).cumsum(0).to(torch.int32)
    x = values(sum(counts) + rest, terms, seed=1)
    return Case(x, values(len(counts), columns, terms, seed=2), offs)


def experts(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return grouped_mm_fallback(x, w.transpose(1, 2), offs)


def native(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(x, w.transpose(1, 2), offs=offs)


def spelled_out(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    ends = offs.tolist()
    parts = zip([0, *ends], ends, w, strict=False)
    return torch.cat([x[a:b] @ matrix.T for a, b, matrix in parts])


def a_split(seed: int) -> list[int]:
    """Return sizes of groups, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    groups = int(torch.randint(1, 9, (), generator=generator))
    rows = int(torch.randint(1, 33, (), generator=generator))
    owner = torch.randint(0, groups, (rows,), generator=generator)
    return torch.bincount(owner, minlength=groups).tolist()


@pytest.mark.parametrize("seed", range(50))
def test_rows_are_multiplied_with_the_matrix_of_their_group(seed: int) -> None:
    check(experts, *case(a_split(seed)), left=())


@pytest.mark.parametrize("counts", [[1], [0, 0, 1], [5, 0, 0], [0, 7], [2, 2, 2, 2], [1] * 9])
def test_groups_may_be_empty(counts: list[int]) -> None:
    check(experts, *case(counts), left=())


def test_rows_in_no_group_are_zero() -> None:
    check(experts, *case([3, 0, 4], rest=5), left=())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_added_in_f32(dtype: torch.dtype) -> None:
    x, w, offs = case([9, 0, 4, 1])
    check(experts, x.to(dtype), w.to(dtype), offs, left=())


def test_pytorch_s_own_grouped_product_is_one() -> None:
    x, w, offs = case([9, 0, 4, 1])
    check(native, x.bfloat16(), w.bfloat16(), offs, exact=spelled_out, left=())


def test_ends_of_groups_may_have_64_bits() -> None:
    x, w, offs = case([3, 6])
    check(experts, x, w, offs.long(), left=())


def test_one_code_serves_any_number_of_rows() -> None:
    counts = ([4, 0, 3, 2], [1, 5, 0, 9], [0, 0, 21, 0])
    first, *others = (Case(x, case([1] * 4).w, offs) for x, _, offs in map(case, counts))
    check(experts, *first, more=others, dynamic=True)


def test_operands_and_results_are_computed_beside_it() -> None:
    def mlp(x: Tensor, gate: Tensor, down: Tensor, offs: Tensor, weight: Tensor) -> Tensor:
        a, b = experts(F.rms_norm(x, (24,)), gate, offs).chunk(2, -1)
        return experts(F.silu(a) * b, down, offs) * weight[:, None]

    x, gate, offs = case([5, 0, 9, 1])
    down = values(4, 24, 20, seed=3)
    check(mlp, x, gate, down, offs, values(15, seed=4), left=())


@fusec_alone
def test_each_product_is_one_kernel_that_reads_each_weight_of_a_group_once() -> None:
    given = case([6, 0, 2, 8], terms=64, columns=128)
    report = fusec.explain(experts, *given)
    (graph,) = report.graphs
    products = [k for k in graph.kernels if k.bytes > 32 << 10]
    assert len(products) == 1
    assert products[0].bytes < 1.2 * graph.bytes_floor


@fusec_alone
def test_many_rows_of_a_group_are_the_library_s() -> None:
    check(experts, *case([90, 80]), left=(FALLBACK,))
    assert [op for op, _ in externs(experts, *case([90, 80]))] == [FALLBACK]


def along_columns(given: Case) -> Case:
    return given._replace(w=given.w.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize("counts", [[3, 4], [0, 9, 5, 0, 40], [33, 0, 31], [64, 0], [5]])
@pytest.mark.parametrize(("terms", "columns"), [(24, 40), (300, 200), (65, 45)])
def test_weights_that_lie_along_columns_are_read_in_place(
    counts: list[int], terms: int, columns: int
) -> None:
    check(experts, *along_columns(case(counts, rest=2, terms=terms, columns=columns)))


@fusec_alone
def test_a_product_of_them_stops_at_the_rows_of_its_group() -> None:
    """Also where rows are gathered and weights are multiplied with what was computed."""

    def gathered(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return experts(F.silu(x[torch.arange(x.shape[0] - 1, -1, -1) // 2]), w, offs)

    given = along_columns(case([5, 20, 0, 40], terms=64, columns=192))
    check(gathered, *given)
    source = "".join(kernel.source for kernel in fusec.kernels(gathered, *given))
    assert "f_multiply<APART>(" in source and "fusec_least(32, " in source


@fusec_alone
def test_sums_of_many_terms_are_as_exact_as_the_library_s() -> None:
    x, w, offs = along_columns(case([9, 20], terms=4096, columns=64))
    exact = experts(x.double(), w.double(), offs)
    own, eager = (
        (y - exact).abs().mean() for y in (compile_with(experts)(x, w, offs), experts(x, w, offs))
    )
    assert own <= 2 * eager


@fusec_alone
@pytest.mark.parametrize("counts", [[1, 2], [50, 40]])
def test_few_and_many_rows_of_them_are_the_library_s(counts: list[int]) -> None:
    given = along_columns(case(counts))
    assert [op for op, _ in externs(experts, *given)] == [FALLBACK]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [[1], [3, 0, 4], [9, 20], [70, 0, 95]])
@pytest.mark.parametrize("strided", [False, True])
def test_neither_are_where_the_library_multiplies_16_bits_one_by_one(
    dtype: torch.dtype, counts: list[int], strided: bool
) -> None:
    x, w, offs = case(counts, rest=2, terms=72)
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if strided else w
    check(experts, x.to(dtype), w.to(dtype), offs)
    if BACKEND == "fusec":
        report = fusec.explain(experts, x.to(dtype), w.to(dtype), offs, target="cpu:avx2")
        assert not report.graphs[0].externs


@fusec_alone
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "f32"))
def test_16_bits_of_more_rows_are_the_library_s_where_it_has_instructions(
    dtype: torch.dtype,
) -> None:
    x, w, offs = case([12, 20, 8, 16])
    report = fusec.explain(experts, x.to(dtype), w.to(dtype), offs, target="cpu:avx512")
    assert bool(report.graphs[0].externs) is (dtype is torch.bfloat16)


def test_gradients_are_the_library_s() -> None:
    check(experts, *case([3, 0, 4]), train=True)
    if BACKEND == "fusec":
        left = [op for op, _ in externs(experts, *case([3, 0, 4]), train=True)]
        assert left == ["transformers.grouped_mm_fallback_backward.default"]


@fusec_alone
@pytest.mark.parametrize("ends", [[4, 2, 7], [2, 9, 7], [2, 4, 8], [-1, 4, 7]])
def test_ends_that_descend_or_lie_outside_are_reported(ends: list[int]) -> None:
    x, w, _ = case([2, 2, 3])
    call = compile_with(experts)
    with pytest.raises(IndexError, match="out of range"):
        call(x, w, torch.tensor(ends, dtype=torch.int32))


@fusec_alone
@pytest.mark.parametrize("ends", [[0, 2, 1, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 3]])
def test_so_are_those_of_more_groups_than_rows(ends: list[int]) -> None:
    x, w, _ = case([1, 0, 1, 0, 0, 0, 0, 0])
    with pytest.raises(IndexError, match="out of range"):
        compile_with(experts)(x, w, torch.tensor(ends, dtype=torch.int32))


# -- matrices gathered for each row ---------------------------------------------------------------


def gathered(x: Tensor, w: Tensor, which: Tensor) -> Tensor:
    return torch.bmm(w[which], x.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("rows", [1, 2, 7, 20])
def test_a_matrix_gathered_for_each_row_is_read_in_place(rows: int) -> None:
    which = values(rows, dtype=torch.int64, low=0, high=5, seed=3)
    check(gathered, values(rows, 24, seed=1), values(5, 40, 24, seed=2), which)


def gathered_by_rows(x: Tensor, w: Tensor, which: Tensor) -> Tensor:
    return torch.bmm(x.unsqueeze(1), w[which]).squeeze(1)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("columns", [40, 192, 200])
def test_so_is_one_that_lies_along_its_columns(rows: int, columns: int) -> None:
    which = values(rows, dtype=torch.int64, low=0, high=5, seed=3)
    check(gathered_by_rows, values(rows, 24, seed=1), values(5, 24, columns, seed=2), which)


@fusec_alone
@pytest.mark.parametrize("product", [gathered, gathered_by_rows])
def test_no_copy_of_gathered_matrices_is_made(product: Callable[..., Tensor]) -> None:
    def mlp(x: Tensor, up: Tensor, down: Tensor, which: Tensor) -> Tensor:
        return product(F.silu(product(x, up, which)), down, which)

    which = torch.tensor([3, 1, 1, 0, 2, 3])
    matrices = values(5, 192, 256, seed=2), values(5, 256, 192, seed=3)
    up, down = matrices if product is gathered else (matrices[1], matrices[0])
    given = values(6, 256, seed=1), up, down, which
    check(mlp, *given)
    (graph,) = fusec.explain(mlp, *given).graphs
    assert not graph.externs
    assert len(graph.kernels) == 2  # the activation belongs to the first


@fusec_alone
def test_an_index_out_of_range_is_reported() -> None:
    call = compile_with(gathered)
    with pytest.raises(IndexError, match="out of range"):
        call(values(2, 24), values(5, 40, 24), torch.tensor([1, 5]))
