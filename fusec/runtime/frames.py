"""Reserve memory for the interpreter's frames, so that no call of a compile has to map any.

CPython keeps frames in chunks of 16 KiB. A call that does not fit into the last one maps another,
and its return unmaps it; a loop that calls across the end of a chunk pays for both each time, a
page fault included: 8 us (gh-142183; 3.14, and 3.13 with its later patches, keep one chunk back).
Where chunks end depends on the depth of the stack, so the time of a compile varied with its caller.
A frame that needs more than a chunk gets one of its own, rounded up to a power of two bytes, and
the rest of it holds the frames of all calls below.

DenseNet-121, training, cold, CPython 3.11, CPU-seconds: 36.5 and 37.0 with, 45.6 and 44.5 without
(two interleaved pairs at one depth, 2026-11-24); of these in the system 1.0 and 8.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

SLOTS = 33_000
"""Of 8 bytes: a little over 256 KiB, so that the chunk has 512 KiB and half of it is free."""


def with_room(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Return what ``function`` returns, called with memory for a thousand frames of usual size."""
    return function(*args, **kwargs)


with_room.__code__ = with_room.__code__.replace(co_stacksize=SLOTS)
