"""Products of matrices in fusec's own kernels on a device: values and gradients by the fp64 rule.

`FUSEC_RACE=fused` takes every product that has something to fuse with into a kernel. The library's
side is what `test_device` runs into at these sizes; that the two agree is the race's own check.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support import HALF, check, values

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
MODES = pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setenv("FUSEC_RACE", "fused")


def on_device(*shape, dtype=torch.bfloat16, seed=0, scale=1.0):
    return (values(*shape, seed=seed) * scale).to(dtype).cuda()


def operands(m, k, n, dtype=torch.bfloat16, count=1):
    """x[m, k] and weights [n, k], scaled so that results are about one."""
    weights = (on_device(n, k, dtype=dtype, seed=1 + i, scale=k**-0.5) for i in range(count))
    return on_device(m, k, dtype=dtype), *weights


# Whole tiles, ragged ones, and rows whose length is odd, so that accesses are narrow.
SHAPES = ((256, 512, 384), (300, 200, 328), (129, 65, 257), (1024, 1600, 640))


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_and_gelu(shape, dtype):
    m, k, n = shape
    x, w = operands(m, k, n, dtype)
    check(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, on_device(n, dtype=dtype, seed=3))


@pytest.mark.parametrize("rows", (1, 2, 8, 16, 33))
def test_few_rows_as_in_decoding(rows):
    x, w = operands(rows, 1024, 512)
    r = on_device(rows, 512, seed=4)
    check(lambda x, w, r: F.silu(F.linear(x, w)) + r, x, w, r)


def test_a_long_sum_over_few_tiles():
    x, w = operands(64, 16384, 128)
    check(lambda x, w: F.relu(F.linear(x, w)), x, w)


@MODES
def test_swiglu_reads_its_input_once(train):
    x, g, u = operands(256, 384, 512, count=2)
    check(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), x, g, u, train=train)


@DTYPES
@MODES
def test_bias_and_residual(dtype, train):
    x, w = operands(257, 320, 192, dtype)
    r, b = on_device(257, 192, dtype=dtype, seed=4), on_device(192, dtype=dtype, seed=5)
    check(lambda x, w, b, r: r + F.linear(x, w, b), x, w, b, r, train=train)


def test_operands_of_either_order_and_batches():
    def products(a, b, c):
        return (
            F.relu(a.mT[0] @ b.mT[0]) + 1,
            torch.bmm(a.mT, b.mT).tanh(),
            (a.relu() * 2).mT @ (b.mT + 1),
            torch.einsum("bkm,bnk->bnm", a, b) * 0.5,
            F.silu(c[:, ::2] @ c[:, 1::2].mT),
        )

    a, b = on_device(3, 96, 160, scale=0.1), on_device(3, 200, 96, seed=1)
    check(products, a, b, on_device(130, 130, seed=2, scale=0.2))


def test_heads_split_and_permuted_by_the_epilogue():
    x, w = operands(256, 192, 384)

    def heads(x, w):
        return F.linear(x, w).view(2, 128, 6, 64).permute(0, 2, 1, 3).contiguous() * 2

    check(heads, x, w)


def test_several_results_and_the_statistics_of_rows():
    x, w = operands(256, 128, 512)

    def with_statistics(x, w, r):
        h = F.linear(x, w) + r
        variance, mean = torch.var_mean(h.float(), -1, correction=0)
        return h, mean, torch.rsqrt(variance + 1e-5), h.relu()

    check(with_statistics, x, w, on_device(256, 512, seed=5), tol=2e-2)


def test_sizes_that_are_symbols():
    x, w = operands(130, 256, 192)
    check(lambda x, w: F.gelu(F.linear(x, w)) * x.shape[0], x, w, dynamic=True, train=True)


def test_an_mlp_trains():
    torch.manual_seed(0)
    layers = torch.nn.Linear(192, 768), torch.nn.GELU(), torch.nn.Linear(768, 192)
    model = torch.nn.Sequential(torch.nn.LayerNorm(192), *layers).cuda().bfloat16()
    check(model, on_device(4, 65, 192), train=True, tol=2e-2)
