"""The entry of ``torch.compile``: what it knows of the device before anything is traced."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusec.driver import backend
from fusec.driver.stages import JOINT
from fusec.options import Options


@pytest.mark.parametrize(
    ("device", "target", "multiplies"),
    [("cpu", None, True), ("cuda", "sm_90", True), ("cuda", "sm_70", False), ("meta", None, False)],
)
def test_scores_are_computed_again_only_for_kernels_that_are_made(
    device: str, target: str | None, multiplies: bool
) -> None:
    """A GPU without kernels of fusec's runs the library's attention, which saves what it needs."""
    with FakeTensorMode():
        inputs = [torch.empty(4), torch.empty(4, device=device)]
    context = backend.context_of(inputs, Options(target=target))
    (stage,) = (stage for stage in JOINT if stage.name == "wide_products")
    assert stage.only(context) is multiplies
