"""``flex_attention`` is spelled out: what eager does, without a kernel of eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fusec
from fusec.tools.report import explain
from tests.support import check, check_captured, externs

pytestmark = pytest.mark.usefixtures("run_as_written")
N = 48
DOCUMENTS = torch.arange(N) // 20
BIAS = torch.randn(4, N, generator=torch.Generator().manual_seed(3))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture
def run_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep eager calls from Dynamo, which else compiles each of them: a call takes a tenth."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def qkv(
    *, heads: int = 4, batches: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    shapes = ((2, 4, N, 16), (batches, heads, N, 16), (batches, heads, N, 8))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def causal(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return m >= n


def within_documents(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return (m >= n) & (DOCUMENTS[m] == DOCUMENTS[n])


def hidden(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return (m < 30) & (n < 30)


MODIFICATIONS: dict[str, Callable[..., Tensor]] = {
    "bias": lambda s, b, h, m, n: s + BIAS[h, n],
    "ALiBi": lambda s, b, h, m, n: s - SLOPES[h] * (m - n).abs(),
    "soft cap": lambda s, b, h, m, n: 20.0 * torch.tanh(s / 20.0),
    "positions": lambda s, b, h, m, n: torch.where(m - n > 8, s * 0.5, s + h * 0.1 + b),
    "window": lambda s, b, h, m, n: torch.where((m - n).abs() <= 5, s, float("-inf")),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", MODIFICATIONS)
def test_scores_are_modified(name: str) -> None:
    modify = MODIFICATIONS[name]
    check_captured(lambda q, k, v: flex_attention(q, k, v, score_mod=modify), *qkv())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seen", (causal, within_documents, hidden))
def test_block_masks_hide_keys(seen: Callable[..., Tensor]) -> None:
    mask = create_block_mask(seen, None, None, N, N, device="cpu", BLOCK_SIZE=16)
    check_captured(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), *qkv())


def test_kernels_compute_all_of_it_together() -> None:
    mask = create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        modify = MODIFICATIONS["bias"]
        return flex_attention(
            q * 2, k, v, modify, mask, scale=0.3, enable_gqa=True, return_lse=True
        )

    check(attend, *qkv(heads=2))


def test_keys_are_read_once_and_positions_are_no_gathers() -> None:
    """One loop over keys: scores are made once, and a bias by position is a load like others."""
    n, modify = 192, BIAS.repeat(1, 4)
    mask = create_block_mask(hidden, None, None, n, n, device="cpu")
    inputs = tuple(torch.randn(1, 4, n, 64) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, m, n: s + modify[h, n], mask)

    (kernel,) = fusec.kernels(attend, *inputs, race="fused")
    (program,) = kernel.source.split("extern")[1:]
    assert "fusec_in_range" not in program
    assert program.count("f_multiply(") == 2
    check_captured(attend, *inputs)  # most rows see no key


def test_keys_of_one_batch_serve_all() -> None:
    mask = create_block_mask(causal, 2, None, N, N, device="cpu", BLOCK_SIZE=16)
    check_captured(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), *qkv(batches=1))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)])
def test_results_are_laid_out_as_queries_are(order: tuple[int, ...]) -> None:
    q, k, v = qkv()
    back = sorted(range(4), key=order.__getitem__)
    q = q.permute(*order).contiguous().permute(*back)
    check_captured(lambda q, k, v: flex_attention(q, k, v), q, k, v)


def test_sixteen_bits() -> None:
    check_captured(
        lambda q, k, v: flex_attention(q, k, v, MODIFICATIONS["soft cap"]),
        *qkv(dtype=torch.bfloat16),
    )


@pytest.mark.slow
def test_rows_and_keys_of_any_number() -> None:
    def given(rows: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, 2, rows, 16) for _ in range(3))

    check(
        lambda q, k, v: flex_attention(q, k, v, MODIFICATIONS["positions"]),
        *given(20),
        dynamic=True,
        more=(given(33), given(7)),
    )


def test_nothing_is_left_to_eager() -> None:
    mask = create_block_mask(within_documents, None, None, N, N, device="cpu", BLOCK_SIZE=16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, MODIFICATIONS["bias"], mask)

    assert {name for name, _ in externs(attend, *qkv())} <= {"bmm.default"}
    (graph,) = explain(attend, *qkv(dtype=torch.bfloat16), target="sm_90", race="fused").graphs
    assert not graph.externs and len(graph.kernels) == 1
    scores = 2 * 4 * N * N * 4
    assert graph.bytes_eager > 2 * scores > graph.bytes_moved


@pytest.fixture
def trained_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch take attention on a CPU whose gradient is asked for: its own kernel has none."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)


@pytest.mark.usefixtures("trained_on_cpus")
def test_training_on_a_gpu_takes_one_kernel_and_two() -> None:
    mask = create_block_mask(causal, None, None, 512, 512, device="cpu")
    # With fewer rows the loop over keys is spread over programs: a kernel more.
    inputs = (torch.randn(16, 4, 512, 64, dtype=torch.bfloat16),) * 3

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, MODIFICATIONS["soft cap"], mask)

    found = explain(attend, *inputs, target="sm_90", race="fused", train=True).graphs
    assert [len(graph.kernels) for graph in found] == [1, 2]
    assert not any(graph.externs for graph in found)


@pytest.mark.usefixtures("trained_on_cpus")
def test_gradients_are_those_of_the_same_attention_in_plain_operations() -> None:
    mask = create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=16)

    def modified(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, MODIFICATIONS["ALiBi"], mask)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(N)
        scores = q @ k.transpose(-2, -1) * 0.25
        scores = scores - SLOPES[:, None, None] * (at[:, None] - at).abs()
        return scores.masked_fill(at[:, None] < at, float("-inf")).softmax(-1) @ v

    inputs = qkv()
    grads = []
    for function in (torch.compile(modified, backend="fusec", options={"strict": True}), plain):
        given = [x.clone().requires_grad_() for x in inputs]
        function(*given).square().sum().backward()
        grads.append([x.grad for x in given])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_call_whose_functions_do_not_run_without_memory_stays_eagers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a number that depends on data")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, MODIFICATIONS["bias"])

    inputs = qkv()
    expected = attend(*inputs)
    monkeypatch.setattr("fusec.frontend.fx_passes.flex_attention.decomposed_flex_attention", fail)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="fusec", options={"strict": True})
    torch.testing.assert_close(compiled(*inputs), expected)
    assert "flex_attention" in {name for name, _ in externs(attend, *inputs)}
