"""Philox-4x32-10 from its definition, in Python's integers: the reference of every implementation.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LOW = 0xFFFFFFFF

KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((LOW,) * 4, (LOW,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""Counter, key, words: the known-answer tests that the Random123 distribution publishes."""


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Return the four words of a counter of four words under a key of two."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ k, second & LOW, first >> 32 ^ d ^ m, first & LOW
        k, m = k + 0x9E3779B9 & LOW, m + 0xBB67AE85 & LOW
    return a, b, c, d


def random_bits(seed: int, indices: Sequence[int]) -> np.ndarray:
    """Return what ``random(seed, index)`` means: 24 bits of word index % 4 of counter index//4."""
    return np.array([_random_bits(seed, int(i)) for i in indices], dtype="i4")


def _random_bits(seed: int, index: int) -> int:
    counter = index // 4
    words = philox((counter & LOW, counter >> 32, 0, 0), (seed & LOW, seed >> 32 & LOW))
    return words[index % 4] >> 8


def uniforms(seed: int, indices: Sequence[int]) -> np.ndarray:
    """Return the same as f32 in [0, 1)."""
    return (random_bits(seed, indices) * 2.0**-24).astype("f4")
