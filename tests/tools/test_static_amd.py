"""Facts of AMD's assembly: of a line written by hand, and of kernels that Triton compiles."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import offline
from bench.gpu_model import compiled_graphs
from bench.workload import Case, Workload
from fusec.codegen.targets import find_target
from fusec.driver.build import triton_source
from fusec.tools.assembly import assembly_of
from fusec.tools.static_amd import read_assembly
from fusec.tools.static_checks import inspect_kernel

ASSEMBLY = """
	.loc	1 7 3
.LBB0_1:
	buffer_load_dwordx4 v[2:5], v1, s[0:3], 0 offen
	scratch_store_dword off, v1, s32
	s_barrier
	v_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], v[4:5], a[0:3]
	s_cbranch_scc0 .LBB0_1
	.loc	2 40 1
	global_store_short v[0:1], v2, off
	s_endpgm
    .private_segment_fixed_size: 28
    .vgpr_count:     256
"""


def test_assembly_says_accesses_products_loops_and_scratch() -> None:
    facts = read_assembly(ASSEMBLY)
    assert facts.pop("accesses") == {(7, "load", 16): 1, (0, "store", 2): 1}
    assert facts == {
        "registers": 256,
        "spill_bytes": 28,
        "barriers": 1,
        "instructions": 7,
        "mma": 1,
        "loops": 1,
        "dot_loops": 1,
    }


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("heads", "shared", "width"), [(12, 12, 64), (32, 8, 128), (32, 32, 128)])
def test_attention_in_training_keeps_nothing_in_scratch_memory(
    target: str, heads: int, shared: int, width: int
) -> None:
    """The gradient of keys has four products, whose operands an AMD warp holds in registers."""

    def case(_: str) -> Case:
        shapes = [(2, n, 1024, width) for n in (heads, shared, shared)]
        rows = [torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        return Case(attention, tuple(rows))

    workload: Any = types.SimpleNamespace(case=case, train=True)
    assert multiplying_without_scratch(workload, target) == 3


def multiplying_without_scratch(workload: Workload, target: str) -> int:
    """Return how many kernels have MFMA instructions; fail where one keeps values in memory."""
    seen = 0
    for staged in compiled_graphs(workload, find_target(target)):
        assert staged.compiled is not None
        for code in staged.compiled.distinct:
            found = inspect_kernel(assembly_of(triton_source(staged.compiled, code), target))
            seen += found.mma > 0
            assert found.spill_bytes == 0, (staged.name, code)
            assert found.shared_bytes <= found.processor.shared_bytes, (staged.name, code)
            assert found.mma or not found.dots, (staged.name, code)
    return seen


BENCHMARK = [(w, target) for w in offline.WORKLOADS for target in ("gfx942", "gfx950")]
SPILLS = ("written out 8x16x1024x64 training bf16", "gfx942")
"""The gradient of queries keeps 60 bytes of a thread in scratch memory, in 128 x 32 and 8 warps."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "target"),
    [pair for pair in BENCHMARK if (pair[0].label, pair[1]) != SPILLS],
    ids=lambda given: getattr(given, "label", given),
)
def test_a_benchmark_keeps_nothing_in_scratch_memory(workload: Workload, target: str) -> None:
    """Its tiles fit the local data share, and its products are MFMA instructions."""
    multiplying_without_scratch(workload, target)
