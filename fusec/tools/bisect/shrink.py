"""The smallest of a kind that fails: one ingredient less at a time, as long as it still does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def shrink(
    found: T, simpler: Callable[[T], Iterable[T]], fails: Callable[[T], bool], most: int
) -> T:
    """Return what fails while nothing that ``simpler`` makes of it does, after ``most`` trials."""
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
