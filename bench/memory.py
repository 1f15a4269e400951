"""What memory a step needs beyond what is held before it, by the account of Linux.

`VmHWM` of /proc/self/status is the most memory that the process ever had; `5` written to
/proc/self/clear_refs sets it back to what it has now. What the allocator keeps of earlier steps is
given back first, since a step would fill it unseen. Differences below a megabyte mean nothing: the
kernel counts pages in batches.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_mib(step: Callable[[], object], samples: int = 3) -> float | None:
    """Return the median of what a call needs, its results included; None where it cannot be told.

    The step has run before: what is allocated once and for all is no part of it.
    """
    try:
        return statistics.median(_peak_mib(step) for _ in range(samples))
    except OSError:
        return None


def _peak_mib(step: Callable[[], object]) -> float:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
    RESET.write_text("5")
    before = _high_water_kib()
    step()
    return (_high_water_kib() - before) / 1024


def _high_water_kib() -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise OSError("/proc/self/status has no VmHWM")
