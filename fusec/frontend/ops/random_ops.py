"""The custom operations that draw random numbers in graphs, with their fake and eager kernels.

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

The eager kernels here compute the same numbers with PyTorch's operations, for graphs, and calls,
that run eagerly. ``random.py`` lowers the operation, ``draws.py`` puts it into graphs.
"""

from __future__ import annotations

import math

import torch

LARGEST_RANGE = 1 << 32
"""Largest number of integers to choose from: over so many, 48 bits are almost uniform."""
BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Bits of a uniform number in 16-bit types, which represent each multiple of 2^-bits in [0, 1)."""

_LOW = 0xFFFFFFFF
_library = torch.library.Library("fusec", "DEF")
_library.define(
    "random_seeds(int n, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_library.define(
    "random(SymInt[] size, int[] order, Tensor seeds, int which, str kind, ScalarType dtype, "
    "int low=0, int high=0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def random_seeds(n: int, device: torch.device) -> torch.Tensor:
    """Return n seeds, as i64, from the default generator of the device."""
    return torch.randint(2**63 - 1, (n,), dtype=torch.int64, device=device)


def random(
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
            values = _uniform(seed, count, dtype)
        case "normal":
            values = _normal(seed, count, dtype)
        case _:
            a, b = ((u * 2**24).to(torch.int64) for u in _numbers(seed, count, 2))
            values = low + ((a * (high - low) + (b * (high - low) >> 24)) >> 24)
    result = torch.empty_permuted(size, order, dtype=dtype, device=seeds.device)
    return result.copy_(values.view(size))


def _uniform(seed: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.float64:
        first, second = _numbers(seed, count, 2)
        return first.double() + second.double() * 2.0**-24
    (numbers,) = _numbers(seed, count, 1)
    return numbers if dtype not in BITS else (numbers * 2 ** BITS[dtype]).floor() / 2 ** BITS[dtype]


def _normal(seed: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.float64:
        radius, angle = _uniform(seed, 2 * count, dtype).view(count, 2).unbind(1)
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


_library.impl("random_seeds", random_seeds, "CompositeExplicitAutograd")
_library.impl("random", random, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fusec::random_seeds",
    lambda n, device: torch.empty((n,), dtype=torch.int64, device=device),
    lib=_library,
)
torch.library.register_fake(
    "fusec::random",
    lambda size, order, seeds, which, kind, dtype, *bounds: torch.empty_permuted(
        size, order, dtype=dtype, device=seeds.device
    ),
    lib=_library,
)
