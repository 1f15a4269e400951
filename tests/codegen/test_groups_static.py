"""Grouped products in machine code, without a GPU: tensor cores, no spills, one launch each."""

from __future__ import annotations

import pytest
import torch

from fusec.tools.report.static_report import check_kernels
from tests.codegen.test_contraction_static import staged
from tests.codegen.test_groups import experts, gated

pytestmark = pytest.mark.slow


def given(rows: int, groups: int, *, train: bool = False) -> list[torch.Tensor]:
    x = torch.empty(rows, 1024, dtype=torch.bfloat16, requires_grad=train)
    w = torch.empty(groups, 1536, 1024, dtype=torch.bfloat16, requires_grad=train)
    return [x, w.transpose(1, 2), torch.zeros(groups, dtype=torch.int32)]


@pytest.mark.parametrize("rows", (64, 1024, 8192), ids=("few", "some", "many"))
@pytest.mark.parametrize("fn", (experts, gated))
@pytest.mark.parametrize("target", ("sm_80", "sm_90", "sm_100"))
def test_a_grouped_product_spills_nothing(fn, target: str, rows: int) -> None:
    """Of few rows the gate is a kernel of its own: two halves in a program would be too few."""
    report = check_kernels(staged(fn, *given(rows, 16), target=target))
    products = [kernel for kernel in report.kernels if kernel.kind == "contraction"]
    assert len(products) == 1 and len(report.kernels) == 1 + (fn is gated and rows == 64)
    assert not report.faults, str(report)
    assert not any(k.static is None or k.static.spill_bytes for k in report.kernels), str(report)


@pytest.mark.parametrize("target", ("sm_80", "sm_90"))
def test_gradients_spill_nothing(target: str) -> None:
    report = check_kernels(staged(gated, *given(4096, 16, train=True), target=target, train=True))
    assert not report.faults and not any(
        k.static and k.static.spill_bytes for k in report.kernels
    ), str(report)


def test_groups_as_long_as_tiles_are_multiplied_by_wgmma() -> None:
    report = check_kernels(staged(gated, *given(8192, 16)))
    assert "wgmma" in str(report)
