"""Reduce a failing case greedily: one simplification at a time, as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def shrink(
    found: T, simpler: Callable[[T], Iterable[T]], fails: Callable[[T], bool], most: int
) -> T:
    """Return a failing case none of whose simpler cases fails, or the one after ``most`` trials."""
    trials, progress = 0, True
    while progress:
        progress = False
        for candidate in simpler(found):
            trials += 1
            if trials > most:
                return found
            if fails(candidate):
                found, progress = candidate, True
                break
    return found
