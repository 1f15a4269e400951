"""Products of int8 matrices: sums in i32, equal to eager's bit by bit, with what follows them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusec
from tests.support import compile_with, seeded

LEAST, MOST = -128, 127


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(LEAST, MOST + 1, shape, dtype=torch.int8)


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product in i32; eager asks for sizes that it can multiply."""
    return (a.long() @ b.long()).int()


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(32, 64, 64), (1, 256, 64), (17, 1030, 48), (128, 2048, 80), (33, 13, 17), (13, 1, 40)],
)
@pytest.mark.parametrize("turned", [True, False])
def test_sums_are_equal_bit_by_bit(m: int, k: int, n: int, turned: bool) -> None:
    with seeded(m):
        a, b = codes(m, k), codes(n, k).t() if turned else codes(k, n)
    torch._dynamo.reset()
    made = compile_with(torch._int_mm)(a, b)
    assert made.dtype is torch.int32
    assert torch.equal(made, exact(a, b))


@pytest.mark.parametrize("terms", [4096, 1 << 17])
def test_the_largest_terms_are_added_exactly_and_wrap(terms: int) -> None:
    a, b = (torch.full((n, terms), LEAST, dtype=torch.int8) for n in (24, 32))
    torch._dynamo.reset()
    assert torch.equal(compile_with(torch._int_mm)(a, b.t()), exact(a, b.t()))


def test_strided_operands_are_multiplied_where_they_are() -> None:
    with seeded(0):
        a, b = codes(40, 128)[::2, ::2], codes(64, 48)[:, 8:40]
    torch._dynamo.reset()
    assert torch.equal(compile_with(torch._int_mm)(a, b), exact(a, b))


def test_scales_a_bias_and_gelu_are_in_the_kernel_of_the_product() -> None:
    def scaled(a: torch.Tensor, w: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.gelu((torch._int_mm(a, w.t()) * s[:, None] * t + 0.5).to(torch.bfloat16))

    with seeded(0):
        args = codes(32, 128), codes(64, 128), torch.rand(32) / 99, torch.rand(64) / 99
    torch._dynamo.reset()
    (graph,) = fusec.explain(scaled, *args).graphs
    assert not graph.externs
    assert len(graph.kernels) == 1
    torch._dynamo.reset()
    torch.testing.assert_close(compile_with(scaled)(*args), scaled(*args))


def test_a_product_of_int8s_in_int8_wraps() -> None:
    def wrapping(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a[:, :, None] * b[None]).sum(1, dtype=torch.int32)

    with seeded(0):
        a, b = codes(32, 64), codes(64, 48)
    torch._dynamo.reset()
    assert torch.equal(compile_with(wrapping)(a, b), wrapping(a, b))


def test_a_dynamic_linear_quantises_in_a_kernel_of_rows() -> None:
    """Its quantisation is statistics of rows; scales and GELU are the product's epilogue."""

    def linear(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-5) / 127
        q = (x / scale).round().clamp(-127, 127).to(torch.int8)
        return F.gelu((torch._int_mm(q, w.t()) * scale * s).to(x.dtype))

    with seeded(0):
        args = torch.randn(32, 128).bfloat16(), codes(64, 128), torch.rand(64) / 99
    torch._dynamo.reset()
    (graph,) = fusec.explain(linear, *args).graphs
    assert not graph.externs
    assert len(graph.kernels) <= 2
    torch._dynamo.reset()
    torch.testing.assert_close(compile_with(linear)(*args), linear(*args))
