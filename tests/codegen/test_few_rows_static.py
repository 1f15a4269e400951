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
from fusec.tools.report.static_report import check_kernels
from fusec.tools.static_checks import inspect_kernel

PROGRAMS = 0.66 * 132
"""Programs that keep an H200's memory busy: of long steps, 0.66 for each multiprocessor
(``TileTuning.full_long``)."""


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
    verdict = check_kernels([one])
    assert [f"{f.kernel} {f.rule}: {f.seen}" for f in verdict.faults] == []
    assert one.compiled is not None
    first = one.compiled.schedule.steps[0].name
    assert math.prod(a.extent.const for a in one.compiled.programs[first].grid) >= PROGRAMS
    found = inspect_kernel(assemble(one, first))
    assert found.spill_bytes == 0
    assert bool(found.mma or found.wgmma) is multiplies
    assert bool(found.copies) is multiplies


def of_relu(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w.t())


def of_silu(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.silu(x) @ w.t() + r


NEAR = {
    (14336, 4096): {1: 0.85, 4: 0.93, 16: 0.93},
    (4096, 14336): {1: 0.85, 4: 0.82, 16: 0.82},
    (6144, 4096): {1: 0.81, 4: 0.85, 16: 0.80},
    (4096, 4096): {1: 0.74, 4: 0.80, 16: 0.72},
}
"""Columns and terms -> rows -> least share of the floor, all kernels of the product included."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("weight", "rows"), [(w, rows) for w, least in NEAR.items() for rows in least]
)
def test_few_rows_are_near_their_floor_by_the_model(weight: tuple[int, int], rows: int) -> None:
    """An iteration has as many bytes that its barriers cost little; no loop is split."""
    (found,) = check_kernels([staged(of_relu, (rows, weight[1]), weight)]).kernels
    assert found.expected is not None
    assert found.expected.share > NEAR[weight][rows], found.expected


def test_rows_that_are_computed_are_so_for_few_tiles() -> None:
    first, _ = check_kernels([staged(of_silu, (16, 4096), (6144, 4096), (16, 6144))]).kernels
    assert first.expected is not None and first.expected.us < 20.0, first.expected


def of_columns(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)


@pytest.mark.parametrize(
    ("fn", "weight", "rows", "us"),
    [
        *((of_relu, (6144, 4101), 16, 24.0), (of_relu, (6144, 4101), 4, 20.0)),
        *((of_columns, (4096, 4101), 16, 16.0), (of_columns, (4101, 4096), 16, 13.0)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_few_rows_beside_weights_of_odd_stride_do_not_wait_for_long_steps(
    fn, weight: tuple[int, int], rows: int, us: float
) -> None:
    """What no asynchronous copy can load goes through registers; odd rows alone are cached."""
    terms = weight[0] if fn is of_columns else weight[1]
    kernels = check_kernels([staged(fn, (rows, terms), weight)]).kernels
    assert all(k.static is not None and k.static.spill_bytes == 0 for k in kernels)
    assert sum(k.expected.us for k in kernels if k.expected is not None) < us


@pytest.mark.parametrize("shape", ((4, 512, 128), (8, 1024, 64)), ids=str)
def test_a_softmax_that_pays_with_neither_product_of_few_rows_joins_both(
    shape: tuple[int, int, int],
) -> None:
    batch, keys, depth = shape
    heads = (batch, 8, keys, depth)
    compiled = staged(decode, (batch, 32, 1, depth), heads, heads).compiled
    assert compiled is not None
    assert [step.name for step in compiled.schedule.steps] == ["k0_part", "k0"]


def test_tiles_without_tensor_cores_are_not_loaded_ahead() -> None:
    fn, shapes, _ = CASES["a query of one head each"]
    compiled = staged(fn, *shapes).compiled
    assert compiled is not None
    first = compiled.schedule.steps[0].name
    assert compiled.plans[first].stages == 1
    assert "num_stages" not in compiled.sources[first]
