"""Backward kernels of norms in machine code for sm_90, without a GPU.

Rows are loaded ahead through shared memory, so that one program for each multiprocessor keeps its
memory busy (32 KB under way), and column sums stay in registers.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusec.report.static_verdict import judge
from tests.codegen.test_contraction_static import staged, tensors

COLUMNS = 1 << 24


def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, w.shape, w)


def reports(fn, width: int, vectors: int, dtype: torch.dtype = torch.bfloat16):
    shapes = [(COLUMNS // width, width), *[(width,)] * vectors]
    return judge(staged(fn, *tensors(*shapes, dtype=dtype), train=True)[-1:])


@pytest.mark.parametrize(
    ("fn", "width", "vectors"),
    [(layer_norm, 4096, 2), (rms_norm, 4096, 1), (layer_norm, 64, 2), (rms_norm, 16384, 1)],
)
def test_the_backward_of_a_norm_loads_rows_ahead_and_spills_nothing(
    fn, width: int, vectors: int
) -> None:
    verdict = reports(fn, width, vectors)
    assert not verdict.faults and not verdict.warnings
    first, *_ = verdict.kernels
    assert first.static is not None and first.static.copies > 0
    assert first.static.spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", (65, 256, 1000, 1024, 2048, 4097, 8192, 16385, 65536))
@pytest.mark.parametrize(("fn", "vectors"), [(layer_norm, 2), (rms_norm, 1)])
def test_no_backward_of_a_norm_has_a_fault(
    fn, vectors: int, width: int, dtype: torch.dtype
) -> None:
    assert not reports(fn, width, vectors, dtype).faults


@pytest.mark.slow
@pytest.mark.parametrize("fn", [layer_norm, rms_norm])
def test_rows_of_32768_in_f32_are_a_loop_where_two_would_have_to_stay_in_registers(fn) -> None:
    assert not reports(fn, 32768, 2 if fn is layer_norm else 1, torch.float32).faults


@pytest.mark.slow
@pytest.mark.parametrize("width", (64, 1000, 4097, 32768, 65536, 262144))
@pytest.mark.parametrize("fn", [lambda x: x.softmax(-1), lambda x: x.log_softmax(-1)])
def test_no_backward_of_a_softmax_has_a_fault(fn, width: int) -> None:
    assert not reports(fn, width, 0).faults
