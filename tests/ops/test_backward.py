"""Gradients whose column sums are split: values at odd widths, and the same bits each time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tests.triton_backend  # noqa: F401  registers triton_interpreter
from tests.support import check, compile_with, tune, values

SHAPES = [(300, 65), (67, 1000), (23, 4097), (512, 64)]


def layer_norm(x, w, b):
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(x, w, b):
    return F.rms_norm(x, w.shape, w) * 0.5


def bias_gelu(x, w, b):
    return F.gelu(x + b) * w


@pytest.mark.sampled(29)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fn", [layer_norm, rms_norm, bias_gelu])
def test_gradients_of_rows_and_columns_match_eager(fn, shape, dtype):
    vectors = [values(shape[1], dtype=dtype, seed=n) for n in (1, 2)]
    check(fn, values(*shape, dtype=dtype), *vectors, train=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_by_the_kernels_of_a_gpu_match_eager(shape):
    vectors = [values(shape[1], seed=n) for n in (1, 2)]
    check(layer_norm, values(*shape), *vectors, train=True, backend="triton_interpreter")


def gradients(run, x, w, b, dy):
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    run(*leaves).backward(dy)
    return [t.grad for t in leaves]


def test_column_sums_are_the_same_bits_each_time_and_with_any_number_of_threads():
    x, dy = values(3000, 257), values(3000, 257, seed=3)
    w, b = values(257, seed=1), values(257, seed=2)
    run = compile_with(layer_norm, "fusec")
    threads = torch.get_num_threads()
    first = gradients(run, x, w, b, dy)
    again = gradients(run, x, w, b, dy)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        other = gradients(run, x, w, b, dy)
    finally:
        torch.set_num_threads(threads)
    for one, two, three in zip(first, again, other, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def gated(x, images):
    """Gates of halves and thirds: their gradients are stored behind each other."""
    left, right = x.chunk(2, -1)
    a, b, c = images.chunk(3, 1)
    return left * F.gelu(right), a * F.silu(b) * torch.tanh(c), F.glu(x * 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("backend", "dynamic"), [("fusec", False), ("fusec", True), ("triton_interpreter", False)]
)
def test_gradients_of_parts_match_eager(backend, dynamic):
    inputs = values(40, 66), values(2, 6, 8, 33)
    check(gated, *inputs, train=True, dynamic=dynamic, backend=backend)


@pytest.mark.parametrize("backend", ["fusec", "triton_interpreter"])
def test_gradients_of_a_group_norm_in_one_pass_match_eager(backend, monkeypatch):
    """Sums of channels, of their group, and dx in one kernel, as of tensors that are large."""
    tune(monkeypatch, "fusion", detour_launches=0)

    def group_norm(x, w, b):
        return F.group_norm(x, 2, w, b)

    vectors = [values(6, seed=n) for n in (1, 2)]
    check(group_norm, values(3, 6, 700), *vectors, train=True, backend=backend)


def test_gradients_of_results_whose_elements_share_memory_match_eager():
    def windows(x):
        frames = (x * 2).unfold(0, 3, 1)
        return frames, frames.sum(-1), (x + 1).as_strided((3, 4), (2, 1)), (x * 3).t()

    check(windows, values(5, 7), train=True)
