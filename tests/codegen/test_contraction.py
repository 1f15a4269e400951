"""Products of matrices in kernels of fusec's own: values in Triton's interpreter, against eager."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fusec.tools.interpreter.program import run_program
from fusec.tools.report.observe import observe
from tests.support import check
from tests.triton_backend import gpu_pipeline

HALF = (torch.bfloat16, torch.float16)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def fused(fn, *inputs, **options) -> None:
    check(fn, *inputs, backend="triton_fused", **options)


@pytest.mark.sampled(4)  # a diagonal
@pytest.mark.parametrize("dtype", (torch.float32, *HALF))
@pytest.mark.parametrize("shape", ((128, 64, 128), (48, 40, 72), (130, 100, 50)))
def test_linear_and_gelu_are_one_kernel_for_tiles_that_fit_and_ragged_ones(dtype, shape):
    m, k, n = shape
    inputs = (tensor(m, k), tensor(n, k, seed=1), tensor(n, seed=2))
    fused(lambda x, w, b: F.gelu(F.linear(x, w, b)), *(t.to(dtype) for t in inputs))


def test_both_halves_of_swiglu_read_their_input_once():
    x, a, b = tensor(64, 64), tensor(96, 64, seed=1), tensor(96, 64, seed=2)
    fused(lambda x, a, b: F.silu(x @ a.t()) * (x @ b.t()), *(t.bfloat16() for t in (x, a, b)))


def test_a_residual_in_the_epilogue_and_a_transposed_result():
    x, w, r = tensor(64, 48), tensor(48, 80, seed=1), tensor(80, 64, seed=2)
    fused(lambda x, w, r: (x @ w).t() + r, x, w, r)


def test_a_transposed_operand_of_either_side():
    x, w, r = tensor(48, 64), tensor(80, 48, seed=1), tensor(64, 80, seed=2)
    fused(lambda x, w, r: F.relu(x.t() @ w.t() + r), x, w, r)


def test_a_result_that_repeats_an_operand_is_stored_apart():
    def repeated(x, w):
        x = x * 2
        return x.repeat_interleave(8, 0) + 0, torch.sigmoid(x @ w.t())

    fused(repeated, tensor(16, 64), tensor(48, 64, seed=1))


def test_a_batch_of_products():
    a, b = tensor(3, 40, 32), tensor(3, 32, 56, seed=1)
    fused(lambda a, b: torch.tanh(torch.bmm(a, b)) * 0.5, a, b)


def test_heads_split_and_permuted_by_the_epilogue():
    x, w, b = tensor(2, 24, 64), tensor(64, 64, seed=1), tensor(64, seed=2)

    def heads(x, w, b):
        return F.linear(x, w, b).view(2, 24, 4, 16).permute(0, 2, 1, 3).contiguous() * 2.0

    fused(heads, x, w, b)


def test_a_pointwise_producer_is_computed_in_the_products_loop():
    x, w = tensor(64, 64).bfloat16(), tensor(64, 64, seed=1).bfloat16()
    fused(lambda x, w: F.relu(torch.mm(x * 2.0 + 1.0, w)), x, w)


@pytest.mark.parametrize("terms", (128, 100, 96))
def test_an_operand_that_is_the_same_for_a_tile_of_the_sum(terms):
    x, w, v = tensor(32, terms), tensor(4, 24, seed=1), tensor(terms, 24, seed=2)
    fused(lambda x, w, v: x @ w.repeat_interleave(32, 0)[:terms] + x @ v, x, w, v)


def test_an_operand_that_lacks_the_loop_over_the_sum():
    x, w = tensor(32, 16), tensor(16, 24, seed=1)
    fused(lambda x, w: x @ w.roll(3, 0) + x @ w, x, w)


def test_several_results_of_one_product():
    x, w = tensor(32, 64), tensor(64, 48, seed=1)

    def several(x, w):
        y = x @ w
        return y, F.relu(y), (y * 0.5).bfloat16()

    fused(several, x, w)


def test_attention_written_out():
    q, k, v = (tensor(2, 2, 40, 32, seed=s) for s in range(3))
    fused(lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v, q, k, v)


def test_causal_attention_in_half_precision():
    q, k, v = (tensor(1, 2, 48, 32, seed=s).bfloat16() for s in range(3))

    def causal(q, k, v):
        keep = torch.ones(48, 48, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~keep, float("-inf"))
        return torch.softmax(scores, -1) @ v

    fused(causal, q, k, v)


@pytest.mark.sampled(3)  # a diagonal
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("shape", ((1, 2, 48, 32), (2, 1, 150, 24)))
def test_the_librarys_attention_and_its_gradient(shape, causal):
    q, k, v = (tensor(*shape, seed=s) for s in range(3))

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    fused(attention, q, k, v, train=True)


def test_attention_of_grouped_heads_with_a_mask_that_hides_whole_rows():
    q, k, v = tensor(1, 4, 20, 16), tensor(1, 2, 36, 16, seed=1), tensor(1, 2, 36, 16, seed=2)
    mask = torch.rand(20, 36) > 0.5
    mask[3] = False
    fused(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        q,
        k,
        v,
    )


@pytest.mark.parametrize("additive", (False, True))
def test_the_gradient_of_attention_with_a_mask_that_hides_whole_rows(additive):
    q, k, v = tensor(1, 2, 20, 16), tensor(1, 2, 36, 16, seed=1), tensor(1, 2, 36, 16, seed=2)
    mask = torch.rand(20, 36, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[3] = False
    if additive:
        mask = torch.zeros(20, 36).masked_fill(~mask, float("-inf"))
    masked = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    fused(masked, q, k, v, train=True)


def test_the_gradient_of_attention_written_out_computes_the_scores_again():
    q, k, v = (tensor(1, 2, 96, 16, seed=s) for s in range(3))

    def attention(q, k, v):
        row = torch.arange(96)
        scores = q @ k.transpose(-1, -2) / 4
        scores = torch.where(row[:, None] >= row, scores, float("-inf"))
        return torch.softmax(scores, -1) @ v

    fused(lambda *a: checkpoint(attention, *a, use_reentrant=False), q, k, v, train=True)


def test_the_statistics_of_a_products_rows_come_from_its_tiles():
    x, w, r = tensor(32, 32), tensor(512, 32, seed=1) * 0.1, tensor(32, 512, seed=2) + 50.0

    def with_statistics(x, w, r):
        h = F.linear(x, w) + r
        variance, mean = torch.var_mean(h, -1, correction=0)
        return h, mean, torch.rsqrt(variance + 1e-5)

    fused(with_statistics, x, w, r)


def test_the_largest_and_smallest_of_a_products_rows_come_from_its_tiles():
    x, w = tensor(32, 32), tensor(512, 32, seed=1)

    def with_bounds(x, w):
        h = F.linear(x, w)
        return h, h.amax(-1), h.amin(-1, keepdim=True)

    fused(with_bounds, x, w)


def test_the_gradient_of_attention_of_grouped_heads():
    q, k, v = tensor(1, 4, 20, 16), tensor(1, 2, 36, 16, seed=1), tensor(1, 2, 36, 16, seed=2)
    fused(lambda *a: F.scaled_dot_product_attention(*a, enable_gqa=True), q, k, v, train=True)


def test_programs_with_products_mean_in_numpy_what_torch_computes():
    x, w, b = tensor(20, 24), tensor(40, 24, seed=1), tensor(40, seed=2)
    staged = observe(lambda x, w, b: F.relu(F.linear(x, w, b)), (x, w, b))
    compiled = gpu_pipeline(staged[0].graph, "g", race="fused")
    ((_, program),) = compiled.programs.items()
    graph = compiled.schedule.graph
    given = dict(zip(graph.inputs, staged_inputs(graph, x, w, b), strict=True))
    storage = {buffer.base: given[buffer].numpy().ravel().copy() for buffer in program.reads}
    run_program(program, storage, {})
    (out,) = program.writes
    expected = F.relu(F.linear(x, w, b)).numpy().ravel()
    np.testing.assert_allclose(storage[out.base], expected, rtol=1e-5, atol=1e-6)


def staged_inputs(graph, *tensors):
    """Return the tensors in the order of a graph's inputs, which their shapes tell."""
    shapes = {tuple(t.shape): t for t in tensors}
    return [shapes[tuple(e.const for e in buffer.shape)] for buffer in graph.inputs]
