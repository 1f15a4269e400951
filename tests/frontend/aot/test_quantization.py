"""Torch's operators on quantised tensors are written out: as eager computes them, or kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusec
from fusec.frontend.aot import quantization
from fusec.runtime.kernels.cpp_kernel import bf16_products, vector_width
from tests.support import compile_with, seeded

pytest.importorskip("torch.ao.quantization.fx._decomposed", reason="it defines the operators")
aten, ops = torch.ops.aten, torch.ops.quantized_decomposed

INT8 = (-128, 127, torch.int8)
UINT8 = (0, 255, torch.uint8)


def matrix(rows: int = 6, columns: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with seeded(rows):
        x = torch.randn(rows, columns)
    x[0, :4] = torch.tensor([0.5, -0.5, 1.5, -2.5])  # ties of a scale of 1
    x[1, :4] = torch.tensor([1e30, -1e30, torch.inf, -torch.inf])
    return x.to(dtype)


def codes(rows: int = 6, columns: int = 40, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    low, high = (-128, 128) if dtype is torch.int8 else (0, 256)
    with seeded(columns):
        return torch.randint(low, high, (rows, columns)).to(dtype)


def positive(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with seeded(7):
        return (torch.rand(*shape) / 8 + 0.01).to(dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    with seeded(8):
        return torch.randint(-9, 9, shape).to(dtype)


def compiled(call: Callable[..., Any], *args: Any) -> Any:
    torch._dynamo.reset()
    return compile_with(call)(*args)


def fused(call: Callable[..., Any], *args: Any) -> bool:
    torch._dynamo.reset()
    (graph,) = fusec.explain(call, *args).graphs
    return not graph.externs


SCALE = torch.tensor([0.0371], dtype=torch.float64)
ZERO = torch.tensor([3])


def quantize_by_tensors(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return ops.quantize_per_tensor.tensor(x, s, z, *UINT8)


EXACT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "tensor": (lambda x: ops.quantize_per_tensor(x, 0.037, 3, *INT8), (matrix(),)),
    "tensor, ties": (lambda x: ops.quantize_per_tensor(x, 1.0, 0, *INT8), (matrix(),)),
    "tensor, bf16": (
        lambda x: ops.quantize_per_tensor(x, 0.037, 3, *UINT8),
        (matrix(dtype=torch.bfloat16),),
    ),
    "by tensors": (quantize_by_tensors, (matrix(), SCALE, ZERO)),
    "by tensors, f16": (
        quantize_by_tensors,
        (matrix(dtype=torch.float16), SCALE.float(), ZERO.int()),
    ),
    "with bounds": (
        lambda x, s, z, a, b: ops.quantize_per_tensor.tensor2(x, s, z, a, b, torch.int8),
        (matrix(), SCALE, ZERO, torch.tensor(-100), torch.tensor(100)),
    ),
    "channels": (
        lambda x, s, z: ops.quantize_per_channel(x, s, z, 1, *INT8),
        (matrix(), positive(40), zeros(40)),
    ),
    "tokens": (
        lambda x, s, z: ops.quantize_per_token(x, s, z, *INT8),
        (matrix(), positive(6, 1), zeros(6, 1)),
    ),
    "back, tensor": (lambda q: ops.dequantize_per_tensor(q, 0.037, 3, *INT8), (codes(),)),
    "back, bf16": (
        lambda q: ops.dequantize_per_tensor(q, 0.037, 3, *UINT8, out_dtype=torch.bfloat16),
        (codes(dtype=torch.uint8),),
    ),
    "back, by tensors": (
        lambda q, s, z: ops.dequantize_per_tensor.tensor(q, s, z, *INT8, out_dtype=torch.bfloat16),
        (codes(), SCALE, ZERO),
    ),
    "back, with bounds": (
        lambda q, s, z, a, b: ops.dequantize_per_tensor.tensor2(q, s, z, a, b, torch.int8),
        (codes(), SCALE, ZERO, torch.tensor(-100), torch.tensor(100)),
    ),
    "back, channels": (
        lambda q, s, z: ops.dequantize_per_channel(q, s, z, 0, *INT8),
        (codes(), positive(6), zeros(6)),
    ),
    "back, no zeros": (
        lambda q, s: ops.dequantize_per_channel(q, s, None, 1, *INT8, out_dtype=torch.bfloat16),
        (codes(), positive(40)),
    ),
    "back, biases": (
        lambda q, s, z: ops.dequantize_per_channel(
            q, s, z, 0, -(2**31), 2**31 - 1, torch.int32
        ),
        (torch.tensor([2**30 + 1, -7]), positive(2), torch.tensor([2**30, 0])),
    ),
    "back, tokens": (
        lambda q, s, z: ops.dequantize_per_token(q, s, z, *INT8, torch.float32),
        (codes(), positive(6, 1), zeros(6, 1)),
    ),
    "back, groups": (
        lambda q, s, z: ops.dequantize_per_channel_group(q, s, z, -8, 7, torch.int8, 8, s.dtype),
        (codes().clamp(-8, 7), positive(6, 5, dtype=torch.bfloat16), zeros(6, 5).int()),
    ),
    "parameters": (
        lambda x: ops.choose_qparams(x, 0, 255, 1e-6, torch.uint8),
        (matrix()[2:],),
    ),
    "parameters, bf16": (
        lambda x: ops.choose_qparams(x, -128, 127, 1e-6, torch.int8),
        (matrix(dtype=torch.bfloat16)[2:],),
    ),
    "parameters, positive": (
        lambda x: ops.choose_qparams(x.abs() + 1, 0, 255, 1e-6, torch.uint8),
        (matrix()[2:],),
    ),
    "parameters, nothing": (
        lambda x: ops.choose_qparams(x * 0, 0, 255, 1e-6, torch.uint8),
        (matrix()[2:],),
    ),
    "parameters, symmetric": (
        lambda x: ops.choose_qparams_symmetric(x, 0, 255, 1e-6, torch.uint8),
        (matrix()[2:],),
    ),
    "parameters of tokens": (
        lambda x: ops.choose_qparams_per_token(x, torch.int8),
        (matrix(dtype=torch.float16)[2:],),
    ),
    "parameters of tokens, asymmetric": (
        lambda x: ops.choose_qparams_per_token_asymmetric(x, torch.int8),
        (matrix()[2:],),
    ),
    "no fusion": (
        lambda x: ops.convert_element_type.no_fuse(x, torch.bfloat16),
        (matrix(),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_what_torch_writes_in_plain_operations_is_as_exact(name: str) -> None:
    call, args = EXACT[name]
    if name == "back, biases":
        args = (args[0].int(), *args[1:])
    ours, theirs = compiled(call, *args), call(*args)
    torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0, equal_nan=True)
    assert fused(call, *args)


def linear(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """A statically quantised linear as pt2e writes it."""
    x = ops.quantize_per_tensor(x, 0.05, 2, *UINT8)
    x = ops.dequantize_per_tensor(x, 0.05, 2, *UINT8)
    return torch.nn.functional.linear(x, ops.dequantize_per_channel(w, scales, z, 0, *INT8))


def dynamic(
    x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, z: torch.Tensor
) -> torch.Tensor:
    scale, zero = ops.choose_qparams(x, 0, 255, 1e-6, torch.uint8)
    x = ops.quantize_per_tensor.tensor(x, scale, zero, *UINT8)
    x = ops.dequantize_per_tensor.tensor(x, scale, zero, *UINT8)
    return torch.nn.functional.linear(x, ops.dequantize_per_channel(w, scales, z, 0, *INT8))


@pytest.mark.parametrize("call", [linear, dynamic])
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
def test_a_quantised_linear_reads_integers_where_it_multiplies(
    rows: int, call: Callable[..., torch.Tensor]
) -> None:
    with seeded(rows):
        args = torch.randn(rows, 64), codes(96, 64), positive(96), zeros(96)
    ours, theirs = compiled(call, *args), call(*args)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    torch._dynamo.reset()
    *_, kernel = fusec.kernels(call, *args)
    assert "ld_i8" in kernel.source
    assert fused(call, *args)


def test_calls_that_eager_refuses_raise_its_errors() -> None:
    x = matrix()
    with pytest.raises(ZeroDivisionError):
        compiled(lambda x: ops.quantize_per_tensor(x, 0.0, 0, *INT8), x)
    with pytest.raises(AssertionError, match="must include 0"):
        compiled(lambda x: ops.choose_qparams(x, 1, 255, 1e-6, torch.uint8), x)


def test_groups_are_quantised_by_the_function_that_looks_for_nan() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(len(x), 5)
        return ops.quantize_per_channel_group(x, scale, scale * 0, *INT8, 8)

    x = matrix()[2:]
    assert torch.equal(compiled(call, x), call(x))
    with pytest.raises(AssertionError, match="NaN"):
        compiled(call, x * torch.nan)


# -- packed int4 weights ---------------------------------------------------------------------------


def packed(columns: int, terms: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return weights of int4 as torch packs them here, a scale and a zero of each group, and what
    they stand for."""
    with seeded(columns):
        numbers = torch.randint(0, 16, (columns, terms), dtype=torch.int32)
        parameters = torch.rand(terms // group, columns, 2).to(dtype)
    bytes_ = aten._convert_weight_to_int4pack_for_cpu(numbers, 2)
    scale, zero = parameters.double().repeat_interleave(group, 0).unbind(-1)
    return bytes_, parameters, (numbers.t() - 8) * scale + zero


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("columns", "terms", "group"),
    [(64, 64, 32), (128, 256, 128), (16, 32, 32), (48, 64, 64), (112, 96, 32), (320, 256, 256)],
)
@pytest.mark.parametrize("rows", [1, 4, 33])
def test_a_product_of_packed_weights_is_as_exact_as_eager(
    rows: int, columns: int, terms: int, group: int, dtype: torch.dtype
) -> None:
    weights, parameters, exact = packed(columns, terms, group, dtype)
    with seeded(rows):
        x = torch.randn(rows, terms).to(dtype)

    def product(x: torch.Tensor, w: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        return aten._weight_int4pack_mm_for_cpu(x, w, group, parameters)

    args = x, weights, parameters
    ours, theirs, wanted = compiled(product, *args), product(*args), x.double() @ exact
    assert ours.dtype is theirs.dtype
    error, least = ((made - wanted).abs().max().item() for made in (ours, theirs))
    assert error <= 2 * least + 1e-6 * wanted.abs().max().item()
    assert fused(product, *args) or columns <= rows


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 12, 16, 40])
def test_packed_weights_are_read_as_they_lie(rows: int) -> None:
    weights, parameters, _ = packed(256, 256, 64, torch.bfloat16)

    def product(x: torch.Tensor) -> torch.Tensor:
        return aten._weight_int4pack_mm_for_cpu(x, weights, 64, parameters)

    torch._dynamo.reset()
    *_, kernel = fusec.kernels(product, torch.ones(rows, 256, dtype=torch.bfloat16))
    assert "ld_u8(" in kernel.source
    assert not any(name in kernel.source for name in ("ldi_u8", "ldg_u8", "lds_u8"))
    # Rows beside which no tile is worth it; where bf16 is multiplied, fewer than fill a vector.
    most = 15 if bf16_products() != "widened" else 16 if vector_width() == 16 else 14
    assert ("f_multiply" in kernel.source) == (rows > most)


@pytest.mark.parametrize("rows", [1, 4])
def test_bits_of_packed_weights_become_floats_without_shifts(rows: int) -> None:
    weights, parameters, _ = packed(256, 256, 64, torch.bfloat16)

    def product(x: torch.Tensor) -> torch.Tensor:
        return aten._weight_int4pack_mm_for_cpu(x, weights, 64, parameters)

    torch._dynamo.reset()
    *_, kernel = fusec.kernels(product, torch.ones(rows, 256, dtype=torch.bfloat16))
    innermost = kernel.source.split("for (")[-1].split("}")[0]
    assert "f_field<15, 0>(" in innermost
    assert "f_field<240, 0>(" in innermost
    assert not any(name in kernel.source for name in ("f_shr(", "f_select("))
    scaled = re.findall(r"v_t\w* = v_t\w* \* v_t\w*;", innermost)
    assert bool(scaled) is (rows > 1)  # one row: scales multiply the sums of groups


@pytest.mark.parametrize(("block", "halves"), quantization._BLOCKS)
@pytest.mark.parametrize("columns", [64, 112, 128])
def test_codes_are_found_in_each_known_layout(columns: int, block: int, halves: bool) -> None:
    with seeded(columns):
        numbers = torch.randint(0, 16, (columns, 6), dtype=torch.uint8)
    parts = []
    for first in range(0, columns, block):
        own = numbers[first : first + block]
        half = len(own) // 2
        whole = halves and len(own) == block
        low, high = (own[:half], own[half:]) if whole else (own[::2], own[1::2])
        parts.append((low + 16 * high).t().reshape(-1))
    found = quantization.unpacked(torch.cat(parts), 6, block, halves)
    assert torch.equal(found, numbers.t())


def test_a_layout_that_is_not_known_stays_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "_block", lambda: None)
    weights, parameters, _ = packed(64, 64, 32, torch.bfloat16)

    def product(x: torch.Tensor) -> torch.Tensor:
        return aten._weight_int4pack_mm_for_cpu(x, weights, 32, parameters)

    assert not fused(product, torch.ones(3, 64, dtype=torch.bfloat16))


def test_sizes_that_eager_refuses_raise_its_error() -> None:
    weights, parameters, _ = packed(64, 64, 32, torch.bfloat16)

    def product(x: torch.Tensor, group: int) -> torch.Tensor:
        return aten._weight_int4pack_mm_for_cpu(x, weights, group, parameters)

    x = torch.ones(3, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        compiled(product, x, 48)
    with pytest.raises(RuntimeError, match="contiguous"):
        compiled(product, torch.ones(64, 3, dtype=torch.bfloat16).t(), 32)
