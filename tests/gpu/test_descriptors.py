"""Tiles copied by tensor descriptors on a device: values, and the same kernels by pointers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.workload import backend_of
from tests.gpu.products import linear_and_gelu, on_device, operands
from tests.support import HALF, check, compile_with

if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
    pytest.skip("needs a device that copies tiles: sm_90 or later", allow_module_level=True)

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", HALF, ids=str)
MODES = pytest.mark.parametrize("train", (False, True), ids=("forward", "training"))


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setenv("FUSEC_RACE", "fused")
    monkeypatch.setenv("FUSEC_DESCRIPTORS", "always")


@DTYPES
@pytest.mark.parametrize("shape", ((256, 512, 384), (300, 200, 328), (1024, 1600, 640)), ids=str)
def test_linear_and_gelu_of_whole_and_ragged_tiles(shape, dtype):
    check(linear_and_gelu, *operands(*shape, dtype))


def test_operands_of_either_order_and_batches():
    a, b = on_device(3, 200, 136), on_device(3, 136, 264, seed=1, scale=0.1)
    check(lambda a, b: torch.tanh(torch.bmm(a, b)), a, b)
    x, y = on_device(200, 136), on_device(200, 72, seed=2, scale=0.1)
    check(lambda x, y: torch.tanh(x.t() @ y), x, y)
    check(lambda x, y: F.relu(y.t() @ x) + 1, x, y)


@MODES
def test_both_halves_of_swiglu(train):
    x, g, _ = operands(256, 384, 512)
    u = on_device(512, 384, seed=3, scale=384**-0.5)
    check(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), x, g, u, train=train)


@MODES
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("shape", ((2, 4, 256, 64), (1, 2, 333, 128), (2, 2, 200, 80)), ids=str)
def test_attention_and_its_gradient(shape, causal, train):
    q, k, v = (on_device(*shape, seed=seed) for seed in range(3))

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    check(attention, q, k, v, train=train)


@MODES
def test_packed_and_grouped_heads(train):
    def packed(x):
        q, k, v = x.view(2, 300, 3, 4, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(2, 300, 256)

    check(packed, on_device(2, 300, 768), train=train)
    q, k, v = on_device(1, 8, 256, 64), *(on_device(1, 2, 256, 64, seed=s) for s in (1, 2))
    check(lambda *a: F.scaled_dot_product_attention(*a, enable_gqa=True), q, k, v, train=train)


def test_both_configurations_compute_the_same():
    inputs = operands(1000, 1024, 1000)
    found = {}
    for way in ("always", "never"):
        options = {"race": "fused", "descriptors": way, "strict": True}
        torch._dynamo.reset()
        found[way] = torch.compile(linear_and_gelu, backend=backend_of("fusec"), options=options)(
            *inputs
        )
    torch.testing.assert_close(found["always"], found["never"], rtol=2**-7, atol=2**-7)


def test_an_unaligned_tensor_goes_by_pointers_and_a_moved_one_by_new_descriptors():
    x, w, b = operands(256, 128, 256)
    call = compile_with(linear_and_gelu)
    wanted = call(x, w, b)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert shifted.data_ptr() % 16
    torch.testing.assert_close(call(shifted, w, b), wanted, rtol=2**-7, atol=2**-7)
    assert torch.equal(call(x.clone(), w, b), wanted)
    assert torch.equal(call(x, w, b), wanted)
