"""Normalisations against eager: layer, RMS, group, instance and batch norm, and their chains."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.triton_backend  # noqa: F401  registers triton_interpreter
from tests.support import FLOATS, TRAINED, Cases, as_captured, check, in_both, values, with_layout

in_inference, in_training = Cases(), Cases()


def affine(n, dtype=torch.float32):
    return values(n, dtype=dtype, seed=8) + 1, values(n, dtype=dtype, seed=9)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@TRAINED
@in_both
def test_norms_over_the_last_axis_match_eager(dtype, train, check):
    def norms(x, w, b):
        return {
            "layer_norm": F.layer_norm(x, (x.shape[-1],), w, b),
            "layer_norm_weight": F.layer_norm(x, (x.shape[-1],), w),
            "layer_norm_plain": F.layer_norm(x, (x.shape[-1],), eps=1e-3),
            "rms_norm": F.rms_norm(x, (x.shape[-1],), w),
            "rms_norm_eps": F.rms_norm(x, (x.shape[-1],), w, 1e-2),
            "rms_norm_plain": F.rms_norm(x, (x.shape[-1],)),
        }

    check(norms, values(3, 5, 48, dtype=dtype), *affine(48, dtype), train=train)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("n", (1, 7, 33, 100, 1000, 4097))
def test_norms_of_odd_widths_match_eager(n):
    def norms(x, r, w, b):
        return F.layer_norm(x + r, (n,), w, b) * 2, F.rms_norm(x, (n,), w) + r

    check(norms, values(5, n), values(5, n, seed=1), *affine(n), train=n in (33, 1000))


@TRAINED
@as_captured
def test_norms_over_several_axes_match_eager(train, check):
    def norms(x, w, b):
        return F.layer_norm(x, (4, 6), w, b), F.layer_norm(x * 2, (3, 4, 6)), F.rms_norm(x, (4, 6))

    check(norms, values(2, 3, 4, 6), values(4, 6, seed=1), values(4, 6, seed=2), train=train)


@TRAINED
@in_both
def test_norms_written_out_by_hand_match_eager(train, check):
    def norms(x, w):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        rms = w * (x.float() * torch.rsqrt(variance + 1e-6)).to(x.dtype)
        mu, sigma = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        l2 = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return rms, w * (x - mu) / (sigma + 1e-6), l2, F.normalize(x, dim=1)

    check(norms, values(3, 5, 33), affine(33)[0], train=train)
    check(norms, values(3, 5, 33, dtype=torch.bfloat16), affine(33, torch.bfloat16)[0], train=train)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ("transposed", "expanded", "padded_rows", "stepped"))
@as_captured
def test_norms_of_strided_rows_match_eager(layout, check):
    x = with_layout(values(5, 6, 32), layout)
    check(
        lambda x, w, b: (F.layer_norm(x, (32,), w, b) + x, F.rms_norm(x, (32,), w)),
        x,
        *affine(32),
        train=True,
    )


@TRAINED
@in_both
def test_layer_norm_of_the_channels_of_an_image_matches_eager(train, check):
    def norm(x, w, b):
        y = F.layer_norm(x.permute(0, 2, 3, 1), (6,), w, b).permute(0, 3, 1, 2)
        return y + x, F.gelu(y)

    check(norm, values(2, 6, 4, 5), *affine(6), train=train)
    check(norm, with_layout(values(2, 6, 4, 5), "channels_last"), *affine(6), train=train)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@TRAINED
@in_both
def test_group_and_instance_norm_match_eager(layout, train, check):
    def norms(x, w, b):
        return (
            F.group_norm(x, 2, w, b) * 2,
            F.group_norm(x.relu(), 3),
            F.instance_norm(x),
            F.group_norm(x, 6, w, b) + x,
            F.group_norm(x, 1),
        )

    check(norms, with_layout(values(2, 6, 4, 5), layout), *affine(6), train=train)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("training", (False, True), ids=("eval_mode", "train_mode"))
@in_both
def test_batch_norm_normalises_and_updates_its_statistics(layout, training, check):
    norm = nn.BatchNorm2d(6).train(training)
    nn.init.normal_(norm.weight)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    check(nn.Sequential(norm, nn.ReLU()), with_layout(values(4, 6, 5, 3), layout), train=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "module",
    (
        lambda: nn.BatchNorm1d(7),
        lambda: nn.BatchNorm1d(7, affine=False),
        lambda: nn.BatchNorm1d(7, track_running_stats=False),
        lambda: nn.BatchNorm3d(7, eps=1e-2, momentum=0.3),
    ),
    ids=("plain", "no_affine", "no_statistics", "three_axes"),
)
@in_both
def test_variants_of_batch_norm_match_eager(module, check):
    norm = module()
    shape = (4, 7, 2, 3, 2) if isinstance(norm, nn.BatchNorm3d) else (9, 7)
    check(norm, values(*shape) * 3 + 1, train=True)


@in_both
def test_sums_of_sums_of_odd_images_match_eager(check):
    """Two kernels' sums, which are one on a GPU, of many images: rows of 49 elements."""
    check(lambda x: x * x.sum((2, 3)).sum(0)[:, None, None], values(300, 3, 7, 7), train=True)


def far_from_zero(rows):
    """Return columns with other means than 0, and with outliers where a part of them begins."""
    x = values(rows, 8)
    x[:, 1] += 1000
    x[:, 2] = 7.25
    x[0, 3] = 1e4
    x[rows // 2 :, 4] -= 300
    x[-1, 5] = 1e4
    return x


@in_inference
def statistics_of_long_columns_match_eager_whatever_their_means():
    def statistics(x):
        images = x.view(len(x), 2, 4)
        return (*torch.var_mean(x, 0), F.batch_norm(images, None, None, training=True), x.std())

    return statistics, far_from_zero(4099)


@pytest.mark.slow
def test_statistics_of_long_columns_match_eager_on_a_gpu():
    check(lambda x: torch.var_mean(x, 0), far_from_zero(2051), backend="triton_interpreter")


@in_inference
def statistics_of_infinite_values_match_eager():
    x = values(4096, 8)
    x[0, 0], x[9, 1], x[0, 2] = torch.inf, -torch.inf, torch.nan
    return (lambda x: (x.mean(0), x.var(0)), x)


@in_training
def residual_stream_through_two_norms_matches_eager():
    def block(x, r, w, b):
        h = x + r
        y = F.layer_norm(h, (33,), w, b)
        h = h + F.gelu(y)
        return h, F.layer_norm(h, (33,), w, b) * 0.5, y

    return block, values(4, 5, 33), values(4, 5, 33, seed=1), *affine(33)


@in_inference
def norm_of_a_constant_row_matches_eager():
    x = torch.ones(4, 33) * torch.tensor([0.0, 1.0, -3.0, 1e-8])[:, None]
    return (lambda x: (F.layer_norm(x, (33,)), F.rms_norm(x, (33,)), F.normalize(x, dim=-1)), x)


@TRAINED
def test_norms_take_dynamic_shapes(train):
    def norms(x, w, b):
        return F.layer_norm(x, (32,), w, b) + x, F.rms_norm(x, (32,), w) * x.shape[0]

    check(norms, values(3, 5, 32), *affine(32), dynamic=True, train=train)


@in_training
def bias_gelu_residual_and_softmax_chains_match_eager():
    def chains(x, r, b, mask):
        y = F.gelu(x + b) + r
        p = (x * 0.125).masked_fill(mask, -1e9).softmax(-1)
        return y, p, (p * y).sum(-1), F.silu(x) * r

    tensors = values(4, 7, 33), values(4, 7, 33, seed=1), values(33, seed=2)
    return chains, *tensors, values(7, 33, dtype=torch.bool)


@in_training
def rotary_embedding_after_rms_norm_matches_eager():
    def rotate(x, w, cos, sin):
        q = F.rms_norm(x, (x.shape[-1],), w).transpose(1, 2)
        a, b = q.chunk(2, -1)
        return q * cos + torch.cat((-b, a), -1) * sin

    angles = torch.arange(9.0)[:, None] * values(8, seed=3)
    angles = torch.cat((angles, angles), -1)
    return rotate, values(2, 9, 3, 16), affine(16)[0], angles.cos(), angles.sin()


def test_cases_match_eager():
    in_inference.check()


@TRAINED
def test_cases_match_eager_with_their_gradients(train):
    in_training.check(train=train)
