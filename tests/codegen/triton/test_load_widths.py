"""Masks and weights have the layout of the rows beside them, and are exchanged by no threads."""

from __future__ import annotations

import pytest
import torch

import tests.triton_backend  # noqa: F401 (registers the backends)
from fusec.codegen.targets import find_target
from fusec.options import Options
from fusec.tools.report.observe import observe
from fusec.tools.report.stages import Staged, take_through
from fusec.tools.report.static_report import check_kernels
from fusec.tools.report.static_rules import BESIDE_WIDER
from tests.codegen.test_contraction import tensor
from tests.support import TRITON, check


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.masked_fill(mask, float("-inf")), -1)


def staged(x: torch.Tensor, mask: torch.Tensor) -> Staged:
    row, options = find_target("sm_90"), Options.from_compile(None, None)
    (seen,) = observe(masked, [x, mask], options=options, target=row)
    return take_through(seen, row, options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_mask_of_a_softmax_is_loaded_in_the_layout_of_its_scores(dtype: torch.dtype) -> None:
    x, mask = torch.empty(32768, 2048, dtype=dtype), torch.empty(32768, 2048, dtype=torch.bool)
    (kernel,) = check_kernels([staged(x, mask)]).kernels
    assert kernel.static is not None
    assert kernel.static.converted == ()
    # Two for the maximum, two for the sum, and one between; Triton 3.9 needs fewer.
    assert kernel.static.barriers == (3 if TRITON >= (3, 9) else 5)
    together = 16 // dtype.itemsize
    assert kernel.static.widths("load") == {16: 32 // together, together: 32 // together}
    assert [a.demand.left_out for a in kernel.left_out] == [BESIDE_WIDER]


@pytest.mark.parametrize("columns", (1, 40))
def test_masks_of_rows_and_of_single_elements_hide_the_same(columns: int) -> None:
    x, mask = tensor(6, 40), torch.arange(6 * columns).reshape(6, columns) % 7 == 3
    check(masked, x, mask, backend="triton_interpreter")


def test_a_mask_that_does_not_walk_memory_has_the_layout_that_triton_gives_it() -> None:
    x = torch.empty(4096, 2048, dtype=torch.bfloat16)
    for mask in (torch.empty(4096, 1, dtype=torch.bool), torch.empty(2048, 4096).bool().t()):
        compiled = staged(x, mask).compiled
        assert compiled is not None
        assert all("max_contiguous" not in source for source in compiled.sources.values())
