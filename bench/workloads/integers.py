"""Linears whose weights are integers, on CPUs: in plain torch, as eager's packed calls, in a block.

The rows of `bf16` are what they are compared with.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from bench.workload import Case, Workload
from bench.workloads.blocks import LlamaBlock, default_dtype

GROUP = "integer weights on CPUs"


class Int8(nn.Module):
    """``F.linear(x, w.to(x.dtype)) * scale``, with a scale for each column."""

    def __init__(self, terms: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-128, 128, (columns, terms), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(columns).to(dtype) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w.to(x.dtype)) * self.scale


class Int4(nn.Module):
    """Two weights in a byte, and a scale for each group of 128 terms of a column."""

    def __init__(self, terms: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        groups = max(1, terms // 128)
        packed = torch.randint(0, 256, (columns, terms // 2), dtype=torch.uint8)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", torch.rand(columns, groups).to(dtype) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns, groups = self.scale.shape
        codes = torch.stack([self.packed & 15, self.packed >> 4], -1).to(torch.int8) - 8
        w = codes.view(columns, groups, -1).to(x.dtype) * self.scale[..., None]
        return F.linear(x, w.reshape(columns, -1))


class Packed8(Int8):
    """The same by eager's call; in f64, which it refuses, in plain torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            return super().forward(x)
        return torch._weight_int8pack_mm(x, self.w, self.scale)


class Packed4(nn.Module):
    """Eager's call for weights of 4 bits: groups of 128 terms with a scale and a zero."""

    def __init__(self, terms: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        codes = torch.randint(0, 16, (columns, terms), dtype=torch.int32)
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2))
        self.register_buffer("codes", codes.to(torch.uint8))
        self.register_buffer("scale", torch.rand(terms // 128, columns, 2).to(dtype) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float64:
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, 128, self.scale)
        scale, zero = self.scale.repeat_interleave(128, 0).unbind(-1)
        return x @ ((self.codes.t().to(x.dtype) - 8) * scale + zero)


class Plain(nn.Module):
    """A linear without a bias, in the type of its rows."""

    def __init__(self, terms: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("w", torch.randn(columns, terms).to(dtype) / terms**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w)


class PlainGelu(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(super().forward(x))


class Dynamic(Int8):
    """Rows quantised by their largest magnitude, a product of int8, scales and GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = x.abs().amax(1, keepdim=True).float().clamp(min=1e-5) / 127
        codes = (x / step).round().clamp(-127, 127).to(torch.int8)
        return F.gelu((torch._int_mm(codes, self.w.t()) * step * self.scale).to(x.dtype))


class DecodingBlock(LlamaBlock):
    """Llama's block for one token, which is written to the last place of a cache."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads, length)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, self.shared, length, self.head))
        self.cos, self.sin = self.cos[-1:], self.sin[-1:]

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q = self.rotated(self.q(x).view(b, t, self.heads, self.head).transpose(1, 2))
        k = self.rotated(self.k(x).view(b, t, self.shared, self.head).transpose(1, 2))
        self.keys[:, :, -1:] = k
        self.values[:, :, -1:] = self.v(x).view(b, t, self.shared, self.head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Rows(nn.Module):
    """A layer of rows of a sequence, by a linear of a matrix's rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def decoding(
    dtype: torch.dtype, device: str, shrink: int, *, kind: type[nn.Module] | None = None
) -> Case:
    """A step of decoding; results of ``kind``'s linears have the size of a trained layer's."""
    width = max(512, 4096 // shrink)
    with default_dtype(dtype):
        block = DecodingBlock(width, width // 128, 512)
    for name, layer in list(block.named_children()):
        if kind is not None and isinstance(layer, nn.Linear):
            made = kind(layer.in_features, layer.out_features, dtype)
            made.scale /= layer.in_features**0.5
            setattr(block, name, Rows(made))
    return Case(block, (torch.randn(1, 1, width).to(dtype),))


def linear(
    dtype: torch.dtype, device: str, shrink: int, *, kind: type[nn.Module], rows: int
) -> Case:
    side = max(128, 4096 // shrink)
    return Case(kind(side, side, dtype), (torch.randn(rows, side).to(dtype),))


_LINEARS = {
    "plain": Plain, "int8": Int8, "int8 packed": Packed8, "int4": Int4, "int4 packed": Packed4,
}  # fmt: skip


def cpu() -> list[Workload]:
    builds = {
        f"{name} linear {m} rows": partial(linear, kind=kind, rows=m)
        for m in (1, 16, 128)
        for name, kind in _LINEARS.items()
    }
    builds["plain linear + gelu 128 rows"] = partial(linear, kind=PlainGelu, rows=128)
    builds["dynamic linear + gelu 128 rows"] = partial(linear, kind=Dynamic, rows=128)
    kinds = {"plain": None, "int4": Int4, "int4 packed": Packed4}
    builds |= {f"{k} llama block 1 row": partial(decoding, kind=c) for k, c in kinds.items()}
    return [Workload(GROUP, name, build, dtype="bf16") for name, build in builds.items()]
