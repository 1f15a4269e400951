"""Backward passes that wait for memory: kernels, and bytes over the floor, as ``explain`` counts.

A norm's backward reads x and dy once, writes dx once and leaves partial column sums: one percent of
the bytes, or a row for each multiprocessor where that is more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusec
from fusec.tools.report.explanation import GraphReport

ELEMENTS = 1 << 25
BF16 = torch.bfloat16


class Scaled(nn.Module):
    """A function of the inputs and of two vectors that are trained."""

    def __init__(self, width: int, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.empty(width, dtype=BF16)) for _ in range(2))
        self.fn = fn

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.fn(self.w, self.b, *inputs)


def layer_norm(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w)


def residual_norm(w: Tensor, b: Tensor, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.layer_norm(h, w.shape, w, b), h


def backward(fn: Any, *inputs: Tensor, target: str = "sm_90") -> GraphReport:
    """Return the report of a training step's last graph."""
    return fusec.explain(fn, *inputs, train=True, target=target).graphs[-1]


def tensors(*shape: int, count: int = 1) -> list[Tensor]:
    return [torch.empty(shape, dtype=BF16, requires_grad=True) for _ in range(count)]


def over(report: GraphReport) -> float:
    return report.bytes_moved / report.bytes_floor - 1


WIDTHS = (64, 65, 768, 1000, 4096, 4097, 8192, 16384)


@pytest.mark.sampled(3)  # a diagonal
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("norm", "sums"), [(layer_norm, 2), (rms_norm, 1)])
def test_partial_sums_of_a_norm_are_three_two_or_one_for_each_multiprocessor_by_width(
    norm: Any, sums: int, width: int
) -> None:
    """Or as many as a percent of the bytes allows."""
    rows = ELEMENTS // width
    report = backward(Scaled(width, norm), *tensors(rows, width))
    parts = 132 * (3 if width < 1024 else 2 if width < 8192 else 1)
    percent = parts * sums * 8 / (rows * 6) + 0.001  # written and read in f32
    assert len(report.kernels) == 2 and over(report) <= max(percent, 0.0105)


@pytest.mark.sampled(7)  # a diagonal
@pytest.mark.parametrize("width", (16385, 32768, 65536, 262144))
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_a_norm_whose_sums_fit_no_registers_reads_its_rows_twice(norm: Any, width: int) -> None:
    """Partial sums in memory would be read and written once a row, which is more."""
    report = backward(Scaled(width, norm), *tensors(ELEMENTS // width, width))
    assert len(report.kernels) == 2 and over(report) <= 4 / 6 + 0.001


def test_sums_beside_a_norm_of_a_residual_share_its_pass() -> None:
    report = backward(Scaled(4096, residual_norm), *tensors(8192, 4096, count=2))
    assert len(report.kernels) == 2 and over(report) <= 0.065


def test_the_gradient_of_a_bias_shares_the_pass_of_its_activation() -> None:
    model = Scaled(4096, lambda w, b, x: F.gelu(x + b))
    report = backward(model, *tensors(8192, 4096))
    assert len(report.kernels) == 2 and over(report) <= 0.025


def targets(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64)


def fixed(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


def gated(gate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return left * gate(right)


ROWS = {
    "softmax": (lambda x: x.softmax(-1), lambda r, c: ()),
    "log_softmax": (lambda x: x.log_softmax(-1), lambda r, c: ()),
    "cross_entropy": (F.cross_entropy, lambda r, c: (targets(r),)),
    "label smoothing": (
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        lambda r, c: (targets(r),),
    ),
    "nll": (lambda x, t: F.nll_loss(x.log_softmax(-1), t), lambda r, c: (targets(r),)),
    "kl_div": (
        lambda x, t: F.kl_div(x.log_softmax(-1), t, reduction="batchmean"),
        lambda r, c: (fixed(r, c),),
    ),
    "mse": (F.mse_loss, lambda r, c: (fixed(r, c),)),
    "bce": (F.binary_cross_entropy_with_logits, lambda r, c: (fixed(r, c),)),
    "normalize": (lambda x: F.normalize(x, dim=-1), lambda r, c: ()),
    "cosine": (F.cosine_similarity, lambda r, c: tuple(tensors(r, c))),
    "gelu": (F.gelu, lambda r, c: ()),
    "swiglu": (lambda x, g: F.silu(g) * x, lambda r, c: tuple(tensors(r, c))),
    "geglu": (lambda x: gated(F.gelu, x), lambda r, c: ()),
    "swiglu of halves": (lambda x: gated(F.silu, x), lambda r, c: ()),
    "group norm": (lambda x: F.group_norm(x.reshape(-1, 64, 512), 8), lambda r, c: ()),
}
"""Name -> function of x and others, these others for rows and columns."""


@pytest.mark.sampled(29)
@pytest.mark.parametrize("target", ["sm_90", "cpu"])
@pytest.mark.parametrize("name", ROWS)
def test_a_backward_along_rows_is_one_kernel_at_the_floor(name: str, target: str) -> None:
    fn, others = ROWS[name]
    report = backward(fn, *tensors(1024, 4096), *others(1024, 4096), target=target)
    assert (len(report.kernels), report.externs) == (1, ())
    assert over(report) == 0


@pytest.mark.sampled(11)
@pytest.mark.parametrize("width", (64, 1000, 4097, 65536, 262144))
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cross_entropy"])
def test_softmaxes_of_any_width_are_at_the_floor(name: str, width: int) -> None:
    """Or read again what a second sweep over a row needs, where no program holds it."""
    fn, others = ROWS[name]
    again = {"softmax": 2 / 3, "log_softmax": 1 / 3}.get(name, 0) if width > 32768 else 0
    rows = max(8, ELEMENTS // width)
    report = backward(fn, *tensors(rows, width), *others(rows, width))
    assert len(report.kernels) == 1 and over(report) == pytest.approx(again)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("target", "shape"),
    [
        ("sm_90", (2**13, 4096)),
        ("sm_90", (64, 64, 8192)),
        ("sm_90", (64, 64, 64, 128)),
        ("cpu", (2**13, 4096)),
    ],
)
def test_statistics_of_a_batch_are_one_reading_of_it(target: str, shape: tuple[int, ...]) -> None:
    """Sums of squares do not wait for the mean: x is read for both, and to be normalised."""
    (x,) = tensors(*shape)
    x = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
    model = Scaled(shape[1], lambda w, b, x: F.batch_norm(x, None, None, w, b, training=True))
    report = fusec.explain(model, x, train=True, target=target).graphs[0]
    assert len(report.kernels) == 3 and 0.5 <= over(report) <= 0.57


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("points", "again"), [(1000, 0.0), (4096, 0.0), (16384, 2 / 3)])
def test_a_group_norm_of_images_reads_them_once_where_they_stay(points: int, again: float) -> None:
    """Between the sums of a channel and dx stand the sums of its group, which are small.

    128 programs hold 16 MB of x and dy each in f32 with 4096 points, which the cache keeps, and
    four times that with 16384.
    """
    model = Scaled(64, lambda w, b, x: F.group_norm(x, 8, w, b))
    report = backward(model, *tensors(16, 64, points))
    assert len(report.kernels) == 2 and again <= over(report) <= again + 0.01
