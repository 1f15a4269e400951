"""What differs between versions of Triton, and must not be seen above `triton_interior`."""

from __future__ import annotations

import warnings

import pytest

from fusec.runtime.kernels.triton_kernel import TritonSource
from fusec.tools.assembly import assembly_of
from fusec.tools.static_checks import PROCESSORS, inspect_kernel

SCALE_AND_ADD = """\
import triton
import triton.language as tl


@triton.jit
def scale_and_add(x, y):
    i = tl.program_id(0) * 512 + tl.arange(0, 512)
    t = tl.load(x + i)
    tl.store(y + i, t * t + 1.0)
"""
KERNEL = TritonSource(
    "scale_and_add", SCALE_AND_ADD, (("x", "*fp32"), ("y", "*fp32")), (0, 1), ("1", "1", "1")
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", PROCESSORS)
def test_the_ptxas_that_triton_runs_takes_its_code(target: str) -> None:
    report = inspect_kernel(assembly_of(KERNEL, target))
    bytes_a_thread = 512 * 4 // report.threads
    assert report.registers > 0 and report.widths("load") == {bytes_a_thread: 1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("default", ("0", "1", None))
def test_products_and_sums_are_rounded_once_whatever_the_default(
    default: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if default is None:
        monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    else:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", default)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Triton 3.9 warns of a default that it is going to change
        asm = assembly_of(KERNEL, "sm_90")
    assert asm.metadata["enable_fp_fusion"] is True
    assert "FFMA" in asm.sass and "FMUL" not in asm.sass
