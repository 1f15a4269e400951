"""Floats of 8 bits against eager: conversions and copies in kernels, all else as eager does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusec
from fusec.tools.report.emulation import emulate
from tests.support import compile_with

FLOATS8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


def check(fn: Callable[..., Any], *inputs: Any) -> None:
    """Assert that results have eager's types, strides and bits; signs of NaN may differ."""
    torch._dynamo.reset()
    wanted = fn(*inputs)
    for ours, theirs in zip(compile_with(fn)(*inputs), wanted, strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


def left(fn: Callable[..., Any], *inputs: Any) -> list[str]:
    """Return the operations that run as eager kernels."""
    torch._dynamo.reset()
    (graph,) = fusec.explain(fn, *inputs).graphs
    return [call.op for call in graph.externs]


@pytest.mark.parametrize("kind", FLOATS8, ids=str)
def test_each_type_is_converted_to_and_from(kind: torch.dtype) -> None:
    def convert(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        narrowed = [x.to(other).to(kind) for other in (torch.bfloat16, torch.half, torch.double)]
        q = x.to(kind)
        widened = [q.to(other) for other in (torch.bfloat16, torch.half, torch.double, torch.bool)]
        integers = (x * 10).int().to(kind), (x > 0).to(kind), x.abs().to(kind).to(torch.int32)
        chained = q.to(torch.float8_e5m2), x.to(torch.float8_e4m3fn).to(kind)
        return (*narrowed, *widened, *integers, *chained, q.float() * 2 + 1)

    torch.manual_seed(0)
    x = torch.randn(6, 37)
    check(convert, x)
    assert left(convert, x) == []


@pytest.mark.parametrize("kind", FLOATS8, ids=str)
def test_numbers_out_of_range_become_what_eager_makes_of_them(kind: torch.dtype) -> None:
    def convert(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quotient = x / torch.zeros_like(x)
        found = [y.to(kind) for y in (x * 1e6, x * 1e-9, quotient, quotient * 0)]
        return (*found, *(q.float() for q in found))

    check(convert, torch.randn(40))


@pytest.mark.parametrize("kind", FLOATS8, ids=str)
def test_elements_are_moved(kind: torch.dtype) -> None:
    def move(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = x.to(kind)
        joined = torch.cat([q, q[:2]]), torch.stack([q, q], 1), q.repeat(2, 1), q.roll(1, 0)
        chosen = q[at], q.index_select(1, at), torch.where(x > 0, q, q.roll(1, 1))
        made = torch.full((3,), 0.3, dtype=kind).float() + x[0, 0], torch.zeros(4, dtype=kind)
        return (q.t().contiguous(), q.view(-1)[3:9].clone(), *joined, *chosen, *made)

    check(move, torch.randn(6, 10), torch.tensor([4, 0]))


def test_results_of_8_bits_are_verified() -> None:
    def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.copy_(x * 2)
        return x.to(torch.float8_e8m0fnu)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="fusec", options={"verify": True, "cache": False})
    cache = torch.zeros(20).to(torch.float8_e4m3fn)
    assert compiled(torch.ones(20), cache).float().eq(1).all() and cache.float().eq(2).all()


def test_a_cache_is_written_in_place() -> None:
    def step(cache: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        cache[:, 3:5] = key.to(cache.dtype)
        return cache.to(torch.bfloat16) * 2

    caches = [torch.randn(4, 8, 16).to(torch.float8_e4m3fn)] * 2
    ours, theirs = (cache.clone() for cache in caches)
    key = torch.randn(4, 2, 16)
    torch._dynamo.reset()
    assert torch.equal(compile_with(step)(ours, key), step(theirs, key))
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("fn", [
    lambda q: q + q, lambda q: q * 2.0, torch.relu, torch.sum, torch.amax, torch.neg, torch.tril,
    lambda q: q < q, lambda q: q.cumsum(0), lambda q: F.softmax(q, -1), lambda q: q.clamp(0, 1),
])  # fmt: skip
def test_arithmetic_raises_eagers_error(fn: Callable[..., Any]) -> None:
    q = torch.randn(4, 4).to(torch.float8_e4m3fn)
    torch._dynamo.reset()
    with pytest.raises(NotImplementedError) as eager:
        fn(q)
    with pytest.raises(NotImplementedError) as compiled:
        compile_with(fn)(q)
    assert str(compiled.value) == str(eager.value)


def test_what_eager_computes_of_them_is_its_kernel() -> None:
    def compare(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = x.to(torch.float8_e5m2)
        return q == q.roll(1), q.isnan()

    check(compare, torch.randn(50))


def quantised_norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm whose rows are quantised by their greatest value."""
    y = F.rms_norm(x, (x.shape[-1],), weight).float()
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (y / scale).to(torch.float8_e4m3fn), scale


def test_a_norm_and_its_quantisation_are_right() -> None:
    x, weight = torch.randn(64, 512), torch.randn(512)
    torch._dynamo.reset()
    (ours, scale), (theirs, exact) = (
        f(x, weight) for f in (compile_with(quantised_norm), quantised_norm)
    )
    torch.testing.assert_close(scale, exact)
    apart = (ours.float() - theirs.float()).abs() / theirs.float().abs().clamp(min=2**-6)
    assert apart.max() <= 2**-3 and (apart > 0).float().mean() < 1e-3  # one step, at ties


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_a_norm_and_its_quantisation_are_one_kernel_at_the_floor(target: str) -> None:
    x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    weight = torch.empty(4096, dtype=torch.bfloat16)
    (graph,) = fusec.explain(quantised_norm, x, weight, target=target).graphs
    assert len(graph.kernels) == 1 and not graph.externs
    moved = 2 * x.numel() + 2 * weight.numel() + x.numel() + 4 * x.shape[0]
    assert graph.bytes_moved == moved == graph.bytes_floor


def dequantised_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A linear layer whose weight has 8 bits and a scale for each row, with its activation."""
    return F.silu(F.linear(x, weight.to(x.dtype) * scale.to(x.dtype)))


def weights(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(rows, 1)


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_a_product_reads_a_weight_of_8_bits(rows: int) -> None:
    """In one kernel on a GPU, which moves the least bytes: no weight in bf16 is written."""
    x, (weight, scale) = torch.randn(rows, 256, dtype=torch.bfloat16), weights(512, 256)
    torch._dynamo.reset()
    (graph,) = fusec.explain(dequantised_linear, x, weight, scale, target="sm_90").graphs
    assert len(graph.kernels) == 1 and not graph.externs
    assert graph.bytes_moved == graph.bytes_floor
    torch._dynamo.reset()
    compiled = compile_with(dequantised_linear)
    theirs = dequantised_linear(x, weight, scale)
    torch.testing.assert_close(compiled(x, weight, scale), theirs, rtol=2e-2, atol=2e-1)


@pytest.mark.slow
def test_a_product_with_a_weight_of_8_bits_is_right_in_the_emulator() -> None:
    x, (weight, scale) = torch.randn(16, 128, dtype=torch.bfloat16), weights(64, 128)
    torch._dynamo.reset()
    found = emulate(dequantised_linear, [x, weight, scale], options={"race": "fused"})
    assert found.faults == (), str(found)
    assert len(found.kernels) == 1
