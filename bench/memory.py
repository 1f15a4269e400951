"""What memory a step needs beyond what is held before it, by the account of Linux.

`VmHWM` of /proc/self/status is the most memory that the process ever had; `5` written to
/proc/self/clear_refs sets it back to what it has now. What the allocator keeps of earlier steps is
given back first, since a step would fill it unseen. Differences below a megabyte mean nothing: the
kernel counts pages in batches.

glibc maps large blocks one by one, and unmaps them, until the first is freed: from then on it takes
blocks of that size from its heap, where what lies between them decides which holes are filled. The
same step of eager's GPT-2 block needs 55 or 73 MiB then, and 39 where all large blocks are mapped.
So peaks are measured in a process of their own, in which they are (``MALLOC_MMAP_THRESHOLD_``).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

MAPPED_BYTES = 128 << 10
"""From which size on a block is mapped by itself: what glibc begins with."""
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peaks(label: str, peers: list[str], *, shrink: int) -> dict[str, float]:
    """Return a workload's peaks in MiB by peer, of a fresh process; nothing if that fails."""
    command = [sys.executable, "-m", "bench.memory_child", label, ",".join(peers)]
    command += ["--shrink", str(shrink), "--threads", str(torch.get_num_threads())]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MAPPED_BYTES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-500:], file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


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
