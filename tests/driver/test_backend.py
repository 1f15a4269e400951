"""The entry of ``torch.compile``: what it knows of the device before anything is traced."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fusec.driver import backend, compiler
from fusec.driver.stages import JOINT, CompileContext
from fusec.errors import Unsupported


@pytest.mark.parametrize(
    ("device", "target", "multiplies"),
    [("cpu", "cpu", True), ("cuda", "sm_89", True), ("cuda", "sm_70", False), ("cuda", "", False)],
)
def test_scores_are_computed_again_only_for_kernels_that_are_made(
    device: str, target: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without kernels of fusec's runs the library's attention, which saves what it needs."""

    def name_of(device: torch.device) -> str:
        if not target:
            raise Unsupported(f"no target for device {device}")
        return target

    def compile_with(*arguments: object) -> bool:
        context = arguments[-1]
        assert isinstance(context, CompileContext)
        (stage,) = (stage for stage in JOINT if stage.name == "wide_products")
        return stage.only(context)

    monkeypatch.setattr(compiler, "device_target", name_of)
    monkeypatch.setattr(backend, "compile_with", compile_with)
    with FakeTensorMode():
        inputs = [torch.empty(4), torch.empty(4, device=device)]
    graph = fx.symbolic_trace(lambda a, b: a + 1)
    assert backend.fusec(graph, inputs) is multiplies
