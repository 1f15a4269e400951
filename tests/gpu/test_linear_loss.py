"""A linear layer and its loss in chunks of rows on a device: values, gradients, peak memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import fusec
from bench.gpu_timing import peak_bytes
from fusec.runtime.calls.executable import add_product
from tests.support import check, compile_with, tune, values

pytestmark = pytest.mark.gpu

ROWS, WIDTH, CLASSES = 4500, 64, 1000  # three chunks, the last one short


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setenv("FUSEC_CHUNK_BYTES", "2000")
    monkeypatch.setenv("FUSEC_AUTOTUNE", "0")
    monkeypatch.setenv("FUSEC_CACHE", "0")  # sizes of chunks are not in its keys
    tune(monkeypatch, "fusion", chunk_bytes=1 << 16)


def operands(dtype, width=WIDTH, classes=CLASSES):
    x, w = values(ROWS, width), values(classes, width, seed=1) * (1.6 / width**0.5)
    t = values(ROWS, dtype=torch.int64, low=0, high=classes, seed=2)
    t[::7] = -100
    return x.to(dtype).cuda(), w.to(dtype).cuda(), t.cuda()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_loss_and_gradients(reduction, dtype):
    def loss(x, w, t):
        return F.cross_entropy(F.linear(x, w), t, reduction=reduction)

    check(loss, *operands(dtype), train=True, tol=1e-3 if dtype == torch.float32 else 2e-2)


def test_rows_that_are_whole_for_a_product_behind_the_loop():
    """A sum of the weights' gradient in f32 would be as large as the gradient of the logits."""

    def loss(x, w, t):
        return F.cross_entropy(F.linear(x, w), t)

    inputs = operands(torch.bfloat16, 1536, 9216)
    check(loss, *inputs, train=True, tol=2e-2)
    (forward, _) = fusec.explain(loss, *inputs, train=True).graphs
    assert any("is whole" in decision.reason for decision in forward.decisions)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_a_product_is_not_rounded_before_it_is_added(dtype):
    a, b = (torch.randn(*s, device="cuda", dtype=dtype) for s in ((1000, 4096), (4096, 256)))
    total = torch.ones(1000, 256, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        add_product(total, a, b)
    exact = 1 + a.double() @ b.double()  # up to 250, which f16 rounds by up to 0.06
    assert (total - exact).abs().max() < 1e-2
    assert not any("elementwise" in event.key for event in seen.key_averages())


def test_label_smoothing():
    def loss(x, w, t):
        return F.cross_entropy(F.linear(x, w), t, label_smoothing=0.1)

    check(loss, *operands(torch.bfloat16), train=True, tol=2e-2)


def test_the_logits_are_never_whole():
    torch._dynamo.reset()
    rows, width, classes = 16384, 256, 8192
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    t = torch.randint(classes, (rows,), device="cuda")

    def loss(x, w, t):
        return F.cross_entropy(F.linear(x, w), t)

    def peak(fn) -> int:
        step = lambda: torch.autograd.grad(fn(x, w, t), (x, w))  # noqa: E731
        step()
        return peak_bytes(step)

    assert peak(compile_with(loss)) < peak(loss) / 2
