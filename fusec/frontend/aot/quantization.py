"""Write out torch's operators on quantised tensors, so that they fuse with what is around them.

``quantized_decomposed``, in which exported and quantised graphs (pt2e) are written, is a library of
functions in plain torch, and these are traced. Some read a number from a tensor, or check values;
they are written here with tensors instead. A scale of 0, a NaN or an empty range, which some of
them refuse in eager mode, gives infinities and NaN where only the values could tell.

Products of packed int4 weights on CPUs become products of dequantised weights::

    y[m, n] = sum(k: x[m, k] * (code(n, k) * scale[k//g, n] + (zero[k//g, n] - 8 * scale[k//g, n])))

Where a code lies depends on the CPU: columns are packed in blocks of four vectors, the last one may
be shorter. A byte has a term of two columns: of a whole block, from both halves, elsewhere two
neighbours. Which block torch packs is found by packing a small matrix; such calls stay eager
kernels where none of those known here gives the same bytes.

Worked example, two columns, two terms, ``[[1, 2], [3, 4]]``: no block is whole, the bytes are
``[1 + 16*3, 2 + 16*4]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusec.frontend.fx_passes.fx_nodes import aten
from fusec.torch_interior import OpOverload, composite_kernel, running_plainly

# -- operators of pt2e -----------------------------------------------------------------------------

_TRACED = (
    *("quantize_per_tensor.default", "dequantize_per_tensor.default"),
    *("quantize_per_channel.default", "quantize_per_token.default"),
    *("choose_qparams_per_token.default", "choose_qparams_per_token_asymmetric.default"),
    "dequantize_per_channel_group.default",
)
"""Operators whose functions in torch read no values."""


def quantized_decompositions() -> Iterator[tuple[OpOverload, Callable[..., Any]]]:
    """Yield the operators of ``quantized_decomposed`` that exist, each with its decomposition.

    torch defines them on demand.
    """
    for name in (*_TRACED, *_WRITTEN_HERE):
        packet, _, overload = name.partition(".")
        target = getattr(getattr(torch.ops.quantized_decomposed, packet, None), overload, None)
        if target is not None:
            rule = _WRITTEN_HERE.get(name) or composite_kernel(target)
            if rule is not None:
                yield target, _unless_refused(rule)


def _unless_refused(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a decomposition so that it keeps the calls whose arguments it refuses."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        try:
            return rule(*args, **kwargs)
        except (AssertionError, ValueError, ZeroDivisionError):
            return NotImplemented

    return decompose


def _number(value: Any, dtype: torch.dtype) -> Any:
    """Return the number that a tensor of one element holds, as a tensor without axes."""
    return value.reshape(()).to(dtype) if isinstance(value, Tensor) else value


def _quantize(
    x: Tensor, scale: Tensor, zero: Tensor, low: Any, high: Any, kind: torch.dtype
) -> Tensor:
    """Quantise by a scale and a zero that tensors hold; their reciprocal is taken in f64."""
    inverse = (1.0 / _number(scale, torch.float64)).float()
    codes: Tensor = (x.float() * inverse).round() + _number(zero, torch.float32)
    low, high = (_number(bound, torch.float32) for bound in (low, high))
    return codes.clamp(low, high).to(kind)


def _dequantize(
    x: Tensor, scale: Tensor, zero: Tensor, *_: Any, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Dequantise by a scale and a zero that tensors hold, rounded after each operation."""
    out = out_dtype or torch.float32
    wide = torch.promote_types(out, torch.float32)
    shifted: Tensor = x.to(out).to(wide) - _number(zero, wide)
    made: Tensor = shifted.to(out).to(wide) * _number(scale, wide)
    return made.to(out)


def _dequantize_channels(
    x: Tensor, scales: Tensor, zeros: Tensor | None, axis: int, *_: Any, out_dtype: Any = None
) -> Tensor:
    shape = [-1 if k == axis % x.ndim else 1 for k in range(x.ndim)]
    zeros = None if zeros is None else zeros.view(shape)
    return _scaled(x, scales.view(shape), zeros).to(out_dtype or torch.float32)


def _dequantize_tokens(
    x: Tensor,
    scales: Tensor,
    zeros: Tensor,
    low: int,
    high: int,
    kind: Any,
    output_dtype: Any = torch.float32,
) -> Tensor:
    return _scaled(x, scales, zeros).to(output_dtype)


def _scaled(x: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return ``(x - zero) * scale``, for codes of up to 16 bits in f32.

    Eager subtracts in i64, and multiplies in f64 where a scale is: no CPU has such vectors of both.
    """
    if x.dtype.is_floating_point:
        raise ValueError("codes that eager does not subtract from")
    if x.dtype.itemsize <= 2:
        x, scales = x.float(), scales.float()
        zeros = None if zeros is None else zeros.float()
    return (x if zeros is None else x - zeros) * scales


def _choose_parameters(
    x: Tensor, low: int, high: int, least: float, kind: torch.dtype, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero by which codes of a range have room for all elements."""
    if not low <= 0 <= high or low == high:
        raise ValueError("a range of codes that eager refuses")
    smallest, largest = x.amin().clamp(max=0), x.amax().clamp(min=0)

    def divided(difference: Tensor, by: float) -> Tensor:
        """Return a quotient of what is rounded before and after, as in eager mode."""
        return (difference.to(x.dtype).float() / by).to(x.dtype)

    eps = torch.full((1,), least, dtype=torch.float32, device=x.device)
    if symmetric:
        scale = torch.maximum(divided(torch.maximum(-smallest, largest), (high - low) / 2), eps)
        zero = torch.full_like(scale, 128 if kind is torch.uint8 else 0, dtype=torch.int64)
    else:
        scale = torch.maximum(divided(largest.float() - smallest.float(), high - low), eps)
        zero = (low - (smallest / scale).round().to(torch.int32)).clamp(low, high)
    return scale.double(), zero.long()


_WRITTEN_HERE: dict[str, Callable[..., Any]] = {
    "quantize_per_tensor.tensor": _quantize,
    "quantize_per_tensor.tensor2": _quantize,
    "dequantize_per_tensor.tensor": _dequantize,
    "dequantize_per_tensor.tensor2": _dequantize,
    "choose_qparams.tensor": functools.partial(_choose_parameters, symmetric=False),
    "choose_qparams_symmetric.tensor": functools.partial(_choose_parameters, symmetric=True),
    "dequantize_per_channel.default": _dequantize_channels,
    "dequantize_per_token.default": _dequantize_tokens,
    "convert_element_type.no_fuse": lambda x, kind: aten._to_copy.default(x, dtype=kind),
}

# -- packed weights --------------------------------------------------------------------------------

_BLOCKS = ((64, True), (32, True), (32, False), (16, False))
"""Columns of a block, and whether a byte has columns of both halves of it: AVX-512, AVX2, none."""
_GROUPS = (32, 64, 128, 256)


def product_of_int8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Return ``_weight_int8pack_mm``, whose sums and scales are in f32."""
    return (x.float() @ w.float().t() * scale.float()).to(x.dtype)


def product_of_int4(x: Tensor, packed: Tensor, group: int, scale_and_zero: Tensor) -> Any:
    """Return ``_weight_int4pack_mm_for_cpu`` of dequantised weights, its sums in f32.

    Calls that eager refuses are kept, and so are those that it does not check.
    """
    columns, terms = packed.shape[0], x.shape[1]
    if not _is_taken(x, packed, group, scale_and_zero) or (block := _block()) is None:
        return NotImplemented
    scale, zero = scale_and_zero.float().unbind(-1)
    codes = unpacked(packed.view(-1), terms, *block).float()
    groups = codes.view(terms // group, group, columns)
    weights = groups * scale[:, None] + (zero - 8 * scale)[:, None]
    return (x.float() @ weights.view(terms, columns)).to(x.dtype)


def _is_taken(x: Tensor, packed: Tensor, group: int, scale_and_zero: Tensor) -> bool:
    columns, terms = packed.shape[0], x.shape[1]
    sizes = (columns, terms, packed.shape[1])
    return (
        all(isinstance(size, int) and size > 0 for size in sizes)
        and columns % 16 == 0
        and packed.shape[1] * 2 == terms
        and group in _GROUPS
        and terms % group == 0
        and tuple(scale_and_zero.shape) == (terms // group, columns, 2)
        and scale_and_zero.dtype is x.dtype
        and all(t.is_contiguous() and t.device.type == "cpu" for t in (x, packed, scale_and_zero))
    )


def unpacked(packed: Tensor, terms: int, block: int, halves: bool) -> Tensor:
    """Return the codes of packed weights, 0 to 15, as a matrix of terms and columns."""
    columns = packed.numel() * 2 // terms
    whole = columns // block * block
    parts: list[Tensor] = []
    if whole:
        codes = packed[: whole * terms // 2].view(-1, terms, block // 2)
        apart = _halves(codes, -2 if halves else -1).view(-1, terms, block)
        parts.append(apart.transpose(0, 1).reshape(terms, whole))
    if whole < columns:
        codes = packed[whole * terms // 2 :].view(terms, -1)
        parts.append(_halves(codes, -1).view(terms, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _halves(codes: Tensor, axis: int) -> Tensor:
    """Return the lower and the upper half of each byte, along a new axis."""
    shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=codes.device)
    return codes.unsqueeze(axis) >> (shifts if axis == -1 else shifts[:, None]) & 15


@functools.cache
def _block() -> tuple[int, bool] | None:
    """Return which of the known blocks this process's torch packs; None for another one."""
    with running_plainly():
        codes = (torch.arange(4 * 112) * 40503 >> 7 & 15).to(torch.int32).view(112, 4)
        packed = aten._convert_weight_to_int4pack_for_cpu.default(codes, 2).view(-1)
        for block in _BLOCKS:
            if torch.equal(unpacked(packed, 4, *block), codes.t().to(torch.uint8)):
                return block
    return None
