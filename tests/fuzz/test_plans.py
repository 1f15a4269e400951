"""The sweep over plans finds a plan that is wrong, whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from fusec.driver.build import triton_source
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import Compiled
from fusec.runtime.kernels.triton_kernel import TritonSource
from tests.fuzz.plans import Case, SweptKernel, bytes_of, check, unlike
from tests.support import TRITON
from tests.tools.emulator.programs import row

needs_triton = pytest.mark.skipif(not TRITON, reason="compiles with Triton")


def rectified(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)


CASE = Case(rectified, [[row(0, 40, 32), row(1, 32, 24)]])


def with_one_more(
    edit: tuple[str, str], compiled: Compiled, context: CompileContext
) -> Mapping[str, Mapping[str, TritonSource]]:
    """Return one further plan, which prints something else than the first."""
    (name,) = compiled.distinct
    source = triton_source(compiled, name)
    text = source.source.replace(*edit)
    assert text != source.source
    return {name: {"planted": replace(source, source=text)}}


@needs_triton
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("0.0, propagate_nan", "0.1, propagate_nan"), "max error"),
        (("tl.cast(24, ", "tl.cast(23, "), "at other places|max error"),
        (("tl.cast(40, ", "tl.cast(41, "), "out of bounds"),
        (("tl.dot(", "tl.product("), "product"),
    ],
    ids=("a value", "a mask", "an access", "what does not build"),
)
def test_a_plan_that_is_wrong_is_found(edit: tuple[str, str], said: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)plan planted.*({said})"):
        check(CASE, 0, "sm_90", partial(with_one_more, edit))


@needs_triton
def test_equal_code_runs_once() -> None:
    assert check(CASE, 0, "sm_90", partial(with_one_more, ("# kernel", "# the kernel"))) == 1
    assert (
        check(
            CASE,
            0,
            "sm_90",
            partial(with_one_more, ("maximum(v_sum_acc", "maximum(v_sum_acc + 0.0")),
        )
        == 2
    )


def test_results_of_two_orders_of_sums_are_alike() -> None:
    x = torch.randn(1000)
    assert not unlike(x + 1e-3 * torch.randn(1000), x)
    assert unlike(torch.where(torch.arange(1000) == 7, 2.0, x), x)
    assert unlike(torch.where(torch.arange(1000) == 7, torch.nan, x), x)
    assert unlike(torch.arange(3), torch.tensor([0, 1, 1]))


@needs_triton
@pytest.mark.parametrize("lists", [0, 16])
def test_results_of_an_equal_launch_in_memory_hide_no_plan(
    lists: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SweptKernel.__call__

    def again(self: SweptKernel, *args: Tensor) -> None:
        """Launch twice, as the allocator hands out memory that has been used."""
        self.first(*args)
        bytes_of(args[-1])[:lists] = 255  # which it has written itself
        first(self, *args)

    monkeypatch.setattr(SweptKernel, "__call__", again)
    with pytest.raises(AssertionError, match="plan planted"):
        check(CASE, 0, "sm_90", partial(with_one_more, ("tl.cast(24, ", "tl.cast(23, ")))
