"""Products of few rows in machine code, without a GPU: wide loads, no spills, programs for all."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.codegen.targets import find_target
from fusec.options import Options
from fusec.tools.report.observe import observe
from fusec.tools.report.stages import Staged, assemble, take_through
from fusec.tools.report.static_report import judge
from fusec.tools.static_checks import inspect_kernel

UNITS = 132
"""Multiprocessors of an H200."""


def staged(fn, *shapes: tuple[int, ...]) -> Staged:
    inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    options = Options.from_compile(None, {"race": "fused"})
    row = find_target("sm_90")
    (seen,) = observe(fn, inputs, options=options, target=row)
    return take_through(seen, row, options)


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def swiglu(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.silu(x @ a.t()) * (x @ b.t())


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return x @ w.t() + r


CASES = {
    "a query of 4 heads each": (decode, ((1, 32, 1, 128), *[(1, 8, 4096, 128)] * 2), True),
    "a batch of them": (decode, ((16, 32, 1, 128), *[(16, 8, 4096, 128)] * 2), True),
    "a query of one head each": (decode, ((1, 32, 1, 128), *[(1, 32, 4096, 128)] * 2), False),
    "2 rows and SwiGLU": (swiglu, ((2, 4096), *[(14336, 4096)] * 2), True),
    "16 rows and SwiGLU": (swiglu, ((16, 4096), *[(14336, 4096)] * 2), True),
    "16 rows of many terms": (residual, ((16, 14336), (4096, 14336), (16, 4096)), True),
    "64 rows": (residual, ((64, 4096), (4096, 4096), (64, 4096)), True),
    "one row": (residual, ((1, 4096), (4096, 4096), (1, 4096)), False),
}
"""Name -> function, shapes, whether tensor cores multiply."""


@pytest.mark.sampled(17)
@pytest.mark.parametrize("name", CASES)
def test_few_rows_load_16_bytes_and_keep_every_multiprocessor_busy(name: str) -> None:
    fn, shapes, multiplies = CASES[name]
    one = staged(fn, *shapes)
    verdict = judge([one])
    assert [f"{f.kernel} {f.rule}: {f.seen}" for f in verdict.faults] == []
    assert one.compiled is not None
    first = one.compiled.schedule.steps[0].name
    assert math.prod(a.extent.const for a in one.compiled.programs[first].grid) >= UNITS
    found = inspect_kernel(assemble(one, first))
    assert found.spill_bytes == 0
    assert bool(found.mma or found.wgmma) is multiplies
    assert bool(found.copies) is multiplies


def of_relu(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w.t())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", (1, 4, 16))
@pytest.mark.parametrize("weight", ((14336, 4096), (4096, 14336)), ids=str)
def test_few_rows_are_near_their_floor_by_the_model(weight: tuple[int, int], rows: int) -> None:
    """An iteration has as many bytes that its barriers cost little beside them."""
    first, *_ = judge([staged(of_relu, (rows, weight[1]), weight)]).kernels
    assert first.expected is not None and first.expected.share > 0.85, first.expected


def test_tiles_without_tensor_cores_are_not_loaded_ahead() -> None:
    fn, shapes, _ = CASES["a query of one head each"]
    compiled = staged(fn, *shapes).compiled
    assert compiled is not None
    first = compiled.schedule.steps[0].name
    assert compiled.plans[first].stages == 1
    assert "num_stages" not in compiled.sources[first]
