"""Keep the garbage collector from visiting the whole process again and again in a compile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 5_000_000
"""Net allocations between two collections of the youngest generation in a compile; default: 700.

Nearly all objects of a compile live until its end. DenseNet-121, training, fusec's own CPU-seconds:
8.6 and 9.0, and 9.8 and 9.9 with a collection each 10,000, which needs 22 MiB of 766 less
(interleaved, 2026-11-24).
"""
FROZEN_AT_START = 1000
"""More objects than an interpreter freezes at its start: 375 (3.12), none (others)."""

_lock = threading.Lock()
_blocks = 0
_is_users = False
_before = gc.get_threshold()


@contextmanager
def settled_heap() -> Iterator[None]:
    """Make collections rare inside this block, and exclude the objects from before it.

    A full collection visits every object of the process, some million beside torch and a model, in
    0.2 CPU-seconds; a compile makes enough objects for two to nine of them, a tenth of its time.
    Blocks may be nested. If the user has frozen the heap, or disabled collections, nothing is
    changed.
    """
    global _blocks, _before
    with _lock:
        collects = gc.isenabled() and gc.get_threshold()[0] > 0
        settles = _blocks > 0 or (collects and not _is_frozen())
        if settles and not _blocks:
            _before = gc.get_threshold()
            gc.freeze()
            gc.set_threshold(max(OBJECTS, _before[0]), *_before[1:])
        _blocks += settles
    try:
        yield
    finally:
        with _lock:
            _blocks -= settles
            if settles and not _blocks:
                gc.set_threshold(*_before)
                _reset_full_collection()
                gc.unfreeze()


def _reset_full_collection() -> None:
    """Reset the count by which the collector decides when its next full collection is due.

    A full collection is due once the objects that survived two young ones since the last full one
    are a quarter of those that it left. A block's objects are frozen, so they do not count among
    the latter, and a full collection of the whole process would begin right behind the block: 0.7
    CPU-seconds between forward and backward of DenseNet-121, 1.2 behind these. Freezing everything
    first makes a full collection visit nothing and set the count to zero.
    """
    gc.freeze()
    gc.collect()


def _is_frozen() -> bool:
    """Return True once the user has frozen the heap.

    Counting visits every frozen object, a million in 0.05 CPU-seconds: it ends once there are many.
    """
    global _is_users
    _is_users = _is_users or gc.get_freeze_count() >= FROZEN_AT_START
    return _is_users
