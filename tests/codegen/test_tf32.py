"""Products of f32 by tensor cores: only where torch's setting says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fusec.codegen.targets import find_target
from fusec.driver.compiler import allows_tf32
from fusec.options import Options
from fusec.tools.assembly import assembly_of
from fusec.tools.report.observe import observe
from fusec.tools.report.stages import Staged, take_through
from fusec.tools.report.static_report import check_kernels
from fusec.tools.static_checks import inspect_kernel
from tests.codegen.kernels import triton_source
from tests.codegen.test_contraction_static import gelu_of_linear, tensors


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def staged(*, tf32: bool, dtype: torch.dtype = torch.float32, **chosen: str) -> Staged:
    options = Options.from_compile(None, {"race": "fused", **chosen})
    inputs = tensors((4096, 1024), (4096, 1024), (4096,), dtype=dtype)
    (seen,) = observe(gelu_of_linear, inputs, options=options)
    return take_through(seen, find_target("sm_90", tf32=tf32), options)


def test_operands_of_f32_are_exact_unless_they_may_be_rounded() -> None:
    for tf32, word in ((False, "ieee"), (True, "tf32")):
        compiled = staged(tf32=tf32).compiled
        assert compiled is not None
        assert f'input_precision="{word}"' in compiled.sources["k0"]


def test_rounded_operands_go_to_the_tensor_cores_without_spills() -> None:
    one = staged(tf32=True)
    assert one.compiled is not None
    found = inspect_kernel(assembly_of(triton_source(one.compiled.programs["k0"]), "sm_90"))
    assert found.wgmma and found.copies and found.spill_bytes == 0
    assert check_kernels([one]).faults == ()


@pytest.mark.slow
def test_rounded_operands_may_be_copied_by_descriptors() -> None:
    one = staged(tf32=True, descriptors="always")
    assert one.compiled is not None
    found = inspect_kernel(assembly_of(triton_source(one.compiled.programs["k0"]), "sm_90"))
    assert found.wgmma and found.tma and not found.copies and found.spill_bytes == 0
    assert check_kernels([one]).faults == ()


def test_kernels_of_16_bits_are_the_same_either_way() -> None:
    exact, rounded = (staged(tf32=tf32, dtype=torch.bfloat16).compiled for tf32 in (False, True))
    assert exact is not None and rounded is not None
    assert exact.sources == rounded.sources


@pytest.mark.usefixtures("precision")
def test_the_setting_is_torchs() -> None:
    torch.set_float32_matmul_precision("highest")
    assert not allows_tf32()
    for word in ("high", "medium"):
        torch.set_float32_matmul_precision(word)
        assert allows_tf32()


@pytest.mark.usefixtures("precision")
def test_a_change_of_the_setting_compiles_anew() -> None:
    torch._dynamo.reset()
    keys: list[str] = []

    def backend(gm, inputs):
        keys.append(f"tf32={allows_tf32()}")
        return gm.forward

    compiled = torch.compile(lambda x: x @ x, backend=backend)
    for word in ("highest", "high", "high"):
        torch.set_float32_matmul_precision(word)
        compiled(torch.ones(4, 4))
    assert keys == ["tf32=False", "tf32=True"]
