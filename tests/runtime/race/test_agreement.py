"""What counts as the same result: sound ways pass, each kind of wrong one is found and named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusec.runtime.race import agreement
from fusec.runtime.race.agreement import disagreement

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True, params=[1 << 24, 50])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "CHUNK", request.param)
    torch.manual_seed(0)


def product(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A product as eager rounds it, as a kernel with another order of the sum does, and exact."""
    a, b = torch.randn(64, 512, dtype=dtype), torch.randn(512, 32, dtype=dtype)
    exact = a.double() @ b.double()
    parts = [a[:, i : i + 64].float() @ b[i : i + 64].float() for i in range(0, 512, 64)]
    return a @ b, torch.stack(parts).sum(0).to(dtype), exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_another_order_of_a_sum_is_no_disagreement(dtype: torch.dtype) -> None:
    eager, ours, exact = product(dtype)
    assert disagreement([ours], [eager]) is None
    assert disagreement([ours], [eager], lambda: [exact]) is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("given", [True, False])
def test_one_wrong_element_is_found(dtype: torch.dtype, given: bool) -> None:
    exact = torch.randn(64, 64, dtype=torch.float64)
    eager = exact.to(dtype)
    ours = eager.clone()
    ours[-1, -1] += 1
    said = disagreement([eager, ours], [eager, eager], (lambda: [exact] * 2) if given else None)
    assert said is not None and said.startswith("output 1: max error 1")


@pytest.mark.sampled(2)
def test_one_wrong_element_in_a_million_is_found() -> None:
    exact = torch.randn(1 << 20, dtype=torch.float64)
    ours = exact.bfloat16()
    ours[-1] += 1  # the root mean square of the error grows by a thousandth
    assert disagreement([ours], [exact.bfloat16()], lambda: [exact]) is not None


def test_a_small_error_everywhere_is_found() -> None:
    exact = torch.randn(1 << 12, dtype=torch.float64)
    ours = (exact + 0.03).bfloat16()  # the largest rounding of eager's is a third of it
    assert disagreement([ours], [exact.bfloat16()], lambda: [exact]) is not None


@pytest.mark.parametrize("dtype", FLOATS)
def test_small_numbers_are_held_to_their_own_scale(dtype: torch.dtype) -> None:
    eager = (torch.rand(64, dtype=torch.float64) * 1e-3).to(dtype)
    assert disagreement([eager * 1.1], [eager]) is not None
    assert disagreement([torch.zeros_like(eager)], [eager]) is not None


def test_what_is_left_of_large_terms_may_differ() -> None:
    eager = torch.tensor([1000.0, -1000.0, 1e-4])
    assert disagreement([torch.tensor([1000.0, -1000.0, 2e-4])], [eager]) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_are_equal(dtype: torch.dtype) -> None:
    eager = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert disagreement([eager.clone()], [eager]) is None
    said = disagreement([1 - eager.to(torch.int64)], [eager.to(torch.int64)])
    assert said == "output 0: 4 of 4 elements differ"


@pytest.mark.parametrize(
    ("ours", "eager", "said"),
    [
        ([NAN, 1.0, INF], [NAN, 1.0, INF], None),
        ([0.0, 1.0], [NAN, 1.0], "NaN at other places"),
        ([NAN, 1.0], [0.0, 1.0], "NaN at other places"),
        ([INF, 1.0], [2.0, 1.0], "infinities at other places"),
        ([INF, 1.0], [-INF, 1.0], "infinities at other places"),
        ([NAN, 2.0], [NAN, 1.0], "max error 1, rms 1"),
        ([INF, 2.0], [INF, 1.0], "max error 1, rms 1"),
    ],
)
def test_nan_and_infinities_are_where_the_reference_has_them(
    ours: list[float], eager: list[float], said: str | None
) -> None:
    found = disagreement([torch.tensor(ours)], [torch.tensor(eager)])
    assert found == (None if said is None else f"output 0: {said}")


def test_nan_and_infinities_may_be_where_fp64_has_them() -> None:
    """Eager's GELU of an infinity in bf16 is NaN; the other elements count as elsewhere."""
    ours, theirs, exact = (torch.ones(4, dtype=torch.bfloat16) for _ in range(3))
    ours[0] = exact[0] = torch.inf
    theirs[0] = torch.nan
    assert disagreement([ours], [theirs], lambda: [exact.double()]) is None
    assert "NaN" in str(disagreement([ours], [theirs]))
    assert "NaN" in str(disagreement([theirs], [ours], lambda: [exact.double()]))
    ours[1] = 2
    assert "NaN" in str(disagreement([ours], [theirs], lambda: [exact.double()]))


def test_an_overflow_does_not_hide_the_rest() -> None:
    exact = torch.tensor([1e6, 1.0], dtype=torch.float64)
    eager = exact.half()
    assert disagreement([torch.tensor([INF, 2.0]).half()], [eager], lambda: [exact]) is not None


@pytest.mark.parametrize(
    ("ours", "eager", "said"),
    [
        ([torch.zeros(2)], [], "1 outputs, not 0"),
        ([torch.zeros(2, 3)], [torch.zeros(3, 2)], "output 0: shape [2, 3], not [3, 2]"),
        (
            [torch.zeros(2)],
            [torch.zeros(2).half()],
            "output 0: type torch.float32, not torch.float16",
        ),
    ],
)
def test_outputs_of_another_form_are_named(
    ours: list[Tensor], eager: list[Tensor], said: str
) -> None:
    assert disagreement(ours, eager) == said


@pytest.mark.parametrize("shape", [(0,), (4, 0), ()])
def test_no_elements_and_one(shape: tuple[int, ...]) -> None:
    assert disagreement([torch.zeros(shape)], [torch.zeros(shape)], list) is None


def test_complex_numbers_and_strides() -> None:
    eager = torch.randn(8, 4, dtype=torch.complex64)
    assert disagreement([eager.t().contiguous().t()], [eager]) is None
    assert disagreement([eager.conj().resolve_conj()], [eager]) is not None
    assert disagreement([eager.conj().resolve_conj()], [eager.conj()]) is None


def test_fp64_is_asked_only_where_ways_are_not_close() -> None:
    def never() -> list[Tensor]:
        raise AssertionError("asked")

    eager = torch.randn(100)
    assert disagreement([eager * (1 + 1e-6)], [eager], never) is None


def test_without_an_fp64_result_the_looser_rule_decides() -> None:
    def no_memory() -> list[Tensor]:
        raise torch.OutOfMemoryError("out of memory")

    eager = torch.ones(100)
    for factor, agrees in ((1.0004, True), (1.002, False)):
        assert (disagreement([eager * factor], [eager], no_memory) is None) is agrees


def test_products_of_rounded_inputs_are_no_disagreement_where_torch_allows_them() -> None:
    eager = torch.randn(1000)
    ours = eager + 2e-3 * eager.abs().mean() * torch.rand(1000)
    assert disagreement([ours], [eager]) is not None
    torch.set_float32_matmul_precision("high")
    try:
        assert disagreement([ours], [eager]) is None
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_is_made_of_16_bit_numbers_has_their_errors_in_f32_too() -> None:
    torch.manual_seed(0)
    narrow = torch.randn(1000, dtype=torch.bfloat16)
    wide = narrow.float() * 20
    apart = wide * (1 + 2e-3 * torch.randn(1000))
    assert disagreement([apart], [wide]) is not None
    assert disagreement([apart], [wide], inputs=[wide]) is not None
    assert disagreement([apart], [wide], inputs=[narrow, torch.arange(3)]) is None


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_rounded_score_may_change_an_element_but_not_all_of_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wanted = torch.randn(4096).to(dtype)
    largest = wanted.abs().argmax()
    rounded, wrong, everywhere = wanted.clone(), wanted.clone(), wanted * 1.06
    rounded[largest] *= 1.06
    wrong[largest] *= -1
    assert disagreement([rounded], [wanted]) is None
    assert disagreement([wrong], [wanted]) is not None
    assert disagreement([everywhere], [wanted]) is not None
