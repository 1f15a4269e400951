"""The texts of a kernel's stages."""

from __future__ import annotations

import pytest

from fusec.errors import UsageError
from fusec.tools.assembly import assembly_of
from tests.runtime.kernels.test_triton_interior import KERNEL


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_every_stage_of_every_target_has_text(target: str) -> None:
    asm = assembly_of(KERNEL, target)
    for stage in asm.stages:
        assert KERNEL.name in asm.text(stage)
    assert len(asm.compiled.kernel) > 1000


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(UsageError, match="unknown stage 'asm'"):
        assembly_of(KERNEL, "sm_90").text("asm")
