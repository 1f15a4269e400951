"""Kernels of training steps in machine code for sm_90, without a GPU: no fault.

A norm's rows are loaded ahead through shared memory, so that one program for each multiprocessor
keeps its memory busy (32 KB under way), and column sums stay in registers.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusec.tools.report.static_report import check_kernels
from tests.codegen.backwards import BACKWARDS
from tests.codegen.test_contraction_static import staged


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("name", "width"),
    [("layer norm", 4096), ("rms norm", 4096), ("layer norm", 64), ("rms norm", 16384)],
)
def test_the_backward_of_a_norm_loads_rows_ahead_and_spills_nothing(name: str, width: int) -> None:
    fn, inputs = BACKWARDS[name]
    verdict = check_kernels(staged(fn, *inputs(width, torch.bfloat16), train=True)[-1:])
    assert not verdict.faults and not verdict.warnings
    first, *_ = verdict.kernels
    assert first.static is not None and first.static.copies > 0
    assert first.static.spill_bytes == 0


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("name", "width", "barriers"),
    [
        *(("layer norm", 768, 0), ("rms norm", 1024, 0), ("layer norm", 2048, 3)),
        *(("layer norm", 12288, 3), ("layer norm", 16384, 3), ("rms norm", 16384, 3)),
    ],
)
def test_the_backward_of_a_norm_is_near_its_floor_by_the_model(
    name: str, width: int, barriers: int
) -> None:
    """Short rows are summed by shuffles; the two sums of a longer one meet once."""
    fn, inputs = BACKWARDS[name]
    first, *_ = check_kernels(staged(fn, *inputs(width, torch.bfloat16), train=True)[-1:]).kernels
    assert first.static is not None and first.expected is not None
    assert max(section.barriers for section in first.static.sections[1:]) == barriers
    assert first.expected.share > 0.8 and first.static.spill_bytes == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "width", "barriers"),
    [("layer norm", n, 3 if n > 1280 else 0) for n in (1096, 2500, 5000, 6736, 9000)]
    + [("rms norm", 2560, 3), ("rms norm", 5000, 3)],
)
def test_few_lanes_are_idle_in_the_backward_of_a_norm_of_no_power_of_two_columns(
    name: str, width: int, barriers: int
) -> None:
    fn, (_, *inputs) = BACKWARDS[name][0], BACKWARDS[name][1](width, torch.bfloat16)
    x = torch.empty((1 << 26) // width, width, dtype=torch.bfloat16)
    first, *_ = check_kernels(staged(fn, x, *inputs, train=True)[-1:]).kernels
    assert first.static is not None and first.expected is not None
    assert max(section.barriers for section in first.static.sections[1:]) == barriers
    assert first.expected.share > 0.89 and first.static.spill_bytes == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "width", "share"),
    [
        *(("layer norm", 1025, 0.9), ("layer norm", 4098, 0.85), ("layer norm", 9001, 0.62)),
        *(("layer norm", 14001, 0.45), ("rms norm", 1001, 0.9), ("rms norm", 14001, 0.85)),
    ],
)
def test_the_backward_of_a_norm_of_rows_that_are_not_aligned_spills_nothing(
    name: str, width: int, share: float
) -> None:
    fn, (_, *inputs) = BACKWARDS[name][0], BACKWARDS[name][1](width, torch.bfloat16)
    x = torch.empty((1 << 26) // width, width, dtype=torch.bfloat16)
    first, *_ = check_kernels(staged(fn, x, *inputs, train=True)[-1:]).kernels
    assert first.static is not None and first.expected is not None
    assert first.expected.share > share and first.static.spill_bytes == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("batch", "channels", "size", "forward", "backward"),
    [
        *((128, 1024, 14, 0.70, 0.83), (128, 512, 28, 0.83, 0.88)),
        *((64, 1024, 14, 0.72, 0.58), (32, 256, 56, 0.73, 0.87)),
        *((16, 128, 56, 0.40, 0.53), (512, 2048, 7, 0.54, 0.74)),
        *((100, 512, 27, 0.77, 0.92), (96, 192, 27, 0.61, 0.62)),
    ],
)
def test_a_batch_norm_of_fewer_images_than_programs_is_near_its_floor_by_the_model(
    batch: int, channels: int, size: int, forward: float, backward: float
) -> None:
    x = torch.empty(batch, channels, size, size, dtype=torch.bfloat16)
    vectors = (torch.empty(channels, dtype=torch.bfloat16) for _ in range(2))
    found = staged(lambda *xs: F.relu(BACKWARDS["batch norm"][0](*xs)), x, *vectors, train=True)
    for one, least in zip(found, (forward, backward), strict=True):
        kernels = check_kernels([one]).kernels
        expected = [k.expected for k in kernels if k.expected is not None]
        assert sum(e.floor_us for e in expected) > least * sum(e.us for e in expected)
        assert all(k.static is not None and k.static.spill_bytes == 0 for k in kernels)


WIDTHS = (64, 1000, 4096, 8192, 16384)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", BACKWARDS)
def test_no_kernel_of_a_training_step_has_a_fault(
    name: str, width: int, dtype: torch.dtype
) -> None:
    fn, inputs = BACKWARDS[name]
    assert not check_kernels(staged(fn, *inputs(width, dtype), train=True)).faults


@pytest.mark.slow
def test_no_backward_of_rows_of_1024_has_a_fault() -> None:
    """The approximate part of the sweep: what a transformer trains most."""
    for name in ("norm of a dropout and a residual", "cross-entropy", "geglu", "rope"):
        fn, inputs = BACKWARDS[name]
        assert not check_kernels(
            staged(fn, *inputs(1024, torch.bfloat16), train=True)[-1:]
        ).faults, name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", (65, 256, 4097, 16385, 32768, 65536))
@pytest.mark.parametrize("name", ["layer norm", "rms norm"])
def test_no_backward_of_a_norm_of_odd_or_long_rows_has_a_fault(
    name: str, width: int, dtype: torch.dtype
) -> None:
    fn, inputs = BACKWARDS[name]
    assert not check_kernels(staged(fn, *inputs(width, dtype), train=True)[-1:]).faults


@pytest.mark.slow
@pytest.mark.parametrize("width", (4097, 32768, 65536, 262144))
@pytest.mark.parametrize("name", ["softmax", "log-softmax", "cross-entropy"])
def test_no_backward_of_a_softmax_of_odd_or_long_rows_has_a_fault(name: str, width: int) -> None:
    fn, inputs = BACKWARDS[name]
    assert not check_kernels(staged(fn, *inputs(width, torch.bfloat16), train=True)[-1:]).faults
