"""Random numbers: the operations that draw them, their eager kernels and their lowering.

``fusec::random_seeds(n, device)`` draws n seeds from torch's default generator of the device, so
that ``torch.manual_seed`` applies. ``fusec::random(size, order, seeds, which, kind, dtype)`` has no
state: element i, in row-major order whatever the strides, is a function of ``seeds[which]`` and i.
A backward that calls it again gets the numbers of the forward.

Number k of a seed is word k % 4 of Philox-4x32-10 with the seed as its key and k // 4 as its
counter, as 24 bits of [0, 1). An element is computed from::

    uniform   f32: number i; 16-bit types: its upper bits, as many as the type has, never 1.0
              f64: numbers 2i and 2i + 1, 48 bits
    normal    Box-Muller transform of numbers 2i and 2i + 1; f64: of two of 48 bits, 4i to 4i + 3
    integer   low + floor((high - low) * u), where u are the 48 bits of numbers 2i and 2i + 1

A draw is a function of a seed and of an element's position, so it fuses like any pointwise
operation, whatever the index it is read at. ``draws.py`` puts it into graphs; draws that it does
not rewrite, such as those from a user's generator, run as eager kernels. Worked example, the
numbers of a dropout over ``x[m, c]``, the second draw of its graph::

    random_1[i0, i1] = f32(random(seeds[1], (768*i0 + i1):i64)) * 5.960464477539063e-08
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from fusec.errors import InternalError
from fusec.frontend.call import AtenCall, Indices
from fusec.frontend.ops.registry import eager_kernel, lowers
from fusec.frontend.ops.views import linearise
from fusec.frontend.shapes import from_torch_dtype
from fusec.frontend.value import Value
from fusec.ir.dtype import F32, F64, I64, DType, compute_type
from fusec.ir.expr import Expr, IndexValue, cast, op
from fusec.ir.index import index

LARGEST_RANGE = 1 << 32
"""Largest number of integers to choose from: over so many, 48 bits are almost uniform."""
BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Bits of a uniform number in 16-bit types, which represent each multiple of 2^-bits in [0, 1)."""

_LOW = 0xFFFFFFFF


@eager_kernel(
    "random_seeds(int n, Device device) -> Tensor",
    lambda n, device: torch.empty((n,), dtype=torch.int64, device=device),
    torch.Tag.nondeterministic_seeded,
)
def draw_seeds(n: int, device: torch.device) -> torch.Tensor:
    """Return n seeds, as i64, from the default generator of the device."""
    return torch.randint(2**63 - 1, (n,), dtype=torch.int64, device=device)


@eager_kernel(
    "random(SymInt[] size, int[] order, Tensor seeds, int which, str kind, ScalarType dtype, "
    "int low=0, int high=0) -> Tensor",
    lambda size, order, seeds, which, kind, dtype, *bounds: torch.empty_permuted(
        size, order, dtype=dtype, device=seeds.device
    ),
)
def draw(
    size: list[int],
    order: list[int],
    seeds: torch.Tensor,
    which: int,
    kind: str,
    dtype: torch.dtype,
    low: int = 0,
    high: int = 0,
) -> torch.Tensor:
    """Return random numbers of shape ``size``.

    Args:
        order: the dimensions from the slowest to the fastest in memory; values do not depend on it.
        kind: "uniform" in [0, 1), "normal" of mean 0 and variance 1, or "integer" in [low, high).
    """
    seed, count = seeds[which], math.prod(size)
    match kind:
        case "uniform":
            values = uniform_numbers(seed, count, dtype)
        case "normal":
            values = normal_numbers(seed, count, dtype)
        case _:
            a, b = ((u * 2**24).to(torch.int64) for u in _numbers(seed, count, 2))
            values = low + ((a * (high - low) + (b * (high - low) >> 24)) >> 24)
    result = torch.empty_permuted(size, order, dtype=dtype, device=seeds.device)
    return result.copy_(values.view(size))


def uniform_numbers(seed: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.float64:
        first, second = _numbers(seed, count, 2)
        return first.double() + second.double() * 2.0**-24
    (numbers,) = _numbers(seed, count, 1)
    return numbers if dtype not in BITS else (numbers * 2 ** BITS[dtype]).floor() / 2 ** BITS[dtype]


def normal_numbers(seed: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.float64:
        radius, angle = uniform_numbers(seed, 2 * count, dtype).view(count, 2).unbind(1)
    else:
        radius, angle = _numbers(seed, count, 2)
    return (-2 * (1 - radius).log()).sqrt() * (angle * (2 * math.pi)).cos()


def _numbers(seed: torch.Tensor, count: int, each: int) -> tuple[torch.Tensor, ...]:
    """Return ``each`` vectors of ``count`` uniform numbers: vector j has numbers each*i + j."""
    counter = torch.arange(-(-count * each // 4), device=seed.device)
    words = torch.stack(_philox(counter, seed), 1).view(-1)[: count * each]
    return ((words >> 8).float() * 2.0**-24).view(count, each).unbind(1)


def _philox(counter: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the four words of each counter, as i64: Salmon et al., SC 2011, ten rounds."""
    a, b, c, d = counter & _LOW, counter >> 32 & _LOW, counter * 0, counter * 0
    k, m = key & _LOW, key >> 32 & _LOW
    for _ in range(10):
        # The products wrap around 2^64; the bits of both halves are right all the same.
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (second >> 32 & _LOW) ^ b ^ k, second & _LOW
        c, d = (first >> 32 & _LOW) ^ d ^ m, first & _LOW
        k, m = k + 0x9E3779B9 & _LOW, m + 0xBB67AE85 & _LOW
    return a, b, c, d


# -- index notation --------------------------------------------------------------------------------

_BITS = {from_torch_dtype(dtype): bits for dtype, bits in BITS.items()}
_Bits: TypeAlias = Callable[[int, int], Expr]
"""(k, n) -> the k-th of the n integers of 24 bits that belong to an element."""


@lowers(torch.ops.fusec.random.default)
def lower_random(
    call: AtenCall, _: Any, __: Any, seeds: Value, which: int, kind: str, ___: Any, *bounds: int
) -> Value:
    """Emit random numbers of a kind."""

    def body(at: Indices) -> Expr:
        seed, place = seeds.at((index(which),)), linearise(at, call.out.shape)

        def bits(k: int, each: int) -> Expr:
            return op("random", seed, IndexValue(place * each + k))

        match kind:
            case "uniform":
                return _uniform(bits, call.out.dtype)
            case "normal":
                return _normal(bits, compute_type(call.out.dtype))
            case "integer":
                return _integer(bits, *bounds)
            case _:
                raise InternalError(kind, stage="frontend")

    return call.define(body)


def _number(bits: _Bits, k: int, each: int, kind: DType) -> Expr:
    """Return one of an element's ``each`` uniform numbers: 24 bits in f32, 48 in f64."""
    if kind is F32:
        return cast(bits(k, each), F32) * 2.0**-24
    high, low = (cast(bits(2 * k + part, 2 * each), F64) for part in (0, 1))
    return high * 2.0**-24 + low * 2.0**-48


def _uniform(bits: _Bits, dtype: DType) -> Expr:
    if dtype not in _BITS:
        return _number(bits, 0, 1, dtype)
    upper = op("shr", bits(0, 1), 24 - _BITS[dtype])
    return cast(upper, F32) * 2.0 ** -_BITS[dtype]


def _normal(bits: _Bits, kind: DType) -> Expr:
    radius, angle = (_number(bits, k, 2, kind) for k in (0, 1))
    length = op("sqrt", op("log", 1.0 - radius) * -2.0)
    return length * op("cos", angle * (2 * math.pi))


def _integer(bits: _Bits, low: int, high: int) -> Expr:
    """Return low + floor((high - low) * u) for 48 bits u, in products of less than 63 bits."""
    upper, lower = (cast(bits(k, 2), I64) for k in (0, 1))
    carried = op("shr", lower * (high - low), 24)
    return op("shr", upper * (high - low) + carried, 24) + low
