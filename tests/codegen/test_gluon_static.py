"""Kernels whose warps have roles in machine code, without a GPU: what each thread has and does."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from fusec.driver.build import triton_source
from fusec.tools.assembly import Assembly, assembly_of
from fusec.tools.report.static_report import check_kernels
from fusec.tools.static_checks import inspect_kernel
from tests.codegen.test_contraction_static import causal, gelu_of_linear, staged, tensors
from tests.support import TRITON


def swiglu(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ w.t()) * (x @ v.t())


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def compiled(fn, *shapes: tuple[int, ...], dtype=torch.bfloat16, train: bool = False) -> Assembly:
    """Return the only kernel of a function, or of its forward, compiled."""
    one, *_ = staged(fn, *tensors(*shapes, dtype=dtype), roles="cooperative", train=train)
    assert one.compiled is not None
    (name,) = one.compiled.distinct
    assert check_kernels([one]).faults == ()
    return assembly_of(triton_source(one.compiled, name), "sm_90")


SPILLED = {(3, 6): 40, (3, 9): 148}
"""Bytes of the keys' gradients of grouped heads of 64 features, with a Triton that spills some."""


def assert_as_designed(asm: Assembly, *products: str, spilled: int = 0) -> None:
    """Two groups of warps multiply by products of such shapes, one warp loads, nothing spills."""
    found, ptx = inspect_kernel(asm), asm.text("ptx")
    assert found.spill_bytes <= spilled and (found.serialised, found.idle_dot_loops) == ((), 0)
    assert found.threads == 384 and found.registers == 168 and found.shared_bytes <= 232448
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\w+)", ptx)) == set(products)
    assert {"240", "40"} <= set(re.findall(r"setmaxnreg\S+\s+(\d+);", ptx))


@pytest.mark.sampled(2)
def test_a_linear_with_gelu() -> None:
    asm = compiled(gelu_of_linear, (8192, 4096), (16384, 4096), (16384,))
    assert_as_designed(asm, "m64n256k16")


@pytest.mark.first
@pytest.mark.parametrize("depth", (128, 64))
@pytest.mark.parametrize("fn", (causal, attention), ids=("causal", "whole"))
def test_attention(fn, depth: int) -> None:
    asm = compiled(fn, *[(1, 16, 8192, depth)] * 3)
    assert_as_designed(asm, "m64n128k16", f"m64n{depth}k16")


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("depth", (64, 128))
def test_an_attention_that_stores_a_value_of_each_row_has_steps_as_wide(depth: int) -> None:
    """What its backward needs takes a few registers, not as many as a row of scores."""
    asm = compiled(causal, *[(2, 16, 2048, depth)] * 3, train=True)
    assert_as_designed(asm, "m64n128k16", f"m64n{depth}k16")


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize(("depth", "step"), ((128, 32), (64, 64)))
@pytest.mark.parametrize("shared", (1, 4), ids=("whole", "grouped"))
def test_an_attentions_gradients(depth: int, step: int, shared: int) -> None:
    """Two sums of 128 features leave room for scores of 32 queries."""

    def grouped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    inputs = tensors((1, 32, 8192, depth), *[(1, 32 // shared, 8192, depth)] * 2)
    how = {"roles": "cooperative", "train": True, "deterministic": True}  # no sums added in memory
    _, backward = staged(grouped, *(x.requires_grad_() for x in inputs), **how)
    assert backward.compiled is not None
    assert [fault for fault in check_kernels([backward]).faults if fault.rule != "spills"] == []
    queries, keys = (
        assembly_of(triton_source(backward.compiled, name), "sm_90")
        for name in backward.compiled.distinct
    )
    assert_as_designed(queries, "m64n64k16", f"m64n{depth}k16")
    spilled = SPILLED.get(TRITON, 0) if shared > 1 and depth == 64 else 0
    assert_as_designed(keys, f"m64n{step}k16", f"m64n{depth}k16", spilled=spilled)


@pytest.mark.slow
def test_a_residual_and_what_the_backward_needs_spill_nothing() -> None:
    def residual(x, w, b, r):
        return gelu_of_linear(x, w, b) + r

    asm = compiled(residual, (8192, 1024), (4096, 1024), (4096,), (8192, 4096), train=True)
    assert inspect_kernel(asm).spill_bytes == 0


@pytest.mark.sampled(2)
def test_swiglu() -> None:
    asm = compiled(swiglu, (8192, 4096), (14336, 4096), (14336, 4096))
    assert_as_designed(asm, "m64n256k16")


def both_ways(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.relu(x @ w.t())
    return y, y.t().contiguous()


@pytest.mark.sampled(2)
def test_results_by_rows_and_by_columns_have_a_tile_each_in_shared_memory() -> None:
    found = inspect_kernel(compiled(both_ways, (4096, 1024), (4096, 1024)))
    assert found.shared_bytes <= found.processor.shared_bytes


@pytest.mark.slow
@pytest.mark.parametrize("shape", ((8192, 1000, 4096), (1000, 1024, 1504), (4096, 768, 768)))
def test_other_shapes_and_f16_have_no_fault(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    compiled(gelu_of_linear, (m, k), (n, k), (n,), dtype=torch.float16)
