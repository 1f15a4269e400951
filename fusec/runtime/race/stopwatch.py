"""How long one call takes on a device whose caches hold none of its inputs.

A sample: overwrite a buffer that is larger than the last-level cache, then call once for each of
several sets of inputs, then divide. So every call finds its inputs in memory, as a layer does whose
weights were last read a whole model ago, and short calls are still far above the clock's grain.

On CUDA the overwriting has a second use. It keeps the device busy while the host enqueues the
calls, so that the events around them see the device's time, not the host's: three launches
are not charged for two more walks through Python that a running model would hide.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fusec.errors import InternalError
from fusec.runtime.calls.executable import BoxedCall

Stopwatch: TypeAlias = Callable[[BoxedCall, Sequence[list[Any]]], float]
"""From a candidate's call and sets of inputs to the microseconds of one call."""

MAX_SETS = 8
SETS_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""What the sets may take together; one set there is always. Making them takes a CPU seconds."""

FLUSH_FACTOR = 2.5
"""Size of the overwritten buffer, in caches."""

MAX_FLUSHES = 64
"""Of one sample: about 3 ms on an H200, the time of 100 launches by a slow host."""

DEFAULT_CACHE = 32 << 20
MAX_CPU_FLUSH = 256 << 20


def stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch for a device.

    Raises:
        InternalError: if there is none for this kind.
    """
    match device.type:
        case "cpu":
            return _cpu_stopwatch()
        case "cuda":
            return _cuda_stopwatch(device)
        case kind:
            raise InternalError(f"nothing is timed on device {kind!r}")


def sets_of_inputs(device: torch.device, nbytes: int) -> int:
    """Return how many sets of this many bytes a sample goes through."""
    allowed = SETS_BYTES.get(device.type, 0) // max(nbytes, 1)
    return max(1, min(MAX_SETS, allowed))


def _cpu_stopwatch() -> Stopwatch:
    flush = torch.empty(min(int(FLUSH_FACTOR * cpu_cache()), MAX_CPU_FLUSH), dtype=torch.uint8)

    def sample(call: BoxedCall, sets: Sequence[list[Any]]) -> float:
        flush.zero_()
        return warm_stopwatch(call, sets)

    return sample


def warm_stopwatch(call: BoxedCall, sets: Sequence[list[Any]]) -> float:
    """Time a call on a CPU whose caches hold what they like: a product computes, it hardly waits.

    A sample costs no more than its calls; to overwrite a cache of 100 MB takes 20 ms. Where torch
    has one thread, its own time is taken, without that of others on the core.
    """
    clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    boxes = [list(inputs) for inputs in sets]
    start = clock()
    for box in boxes:
        call(box)
    return (clock() - start) / 1e3 / len(boxes)


def cpu_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of the largest cache of a core, as Linux says; a guess elsewhere."""
    found = [DEFAULT_CACHE]
    for file in folder.glob("index*/size"):
        try:
            text = file.read_text().strip()
            found.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(found)


def _cuda_stopwatch(device: torch.device) -> Stopwatch:
    with torch.cuda.device(device):
        cache = torch.cuda.get_device_properties(device).L2_cache_size or DEFAULT_CACHE
        flush = torch.empty(int(FLUSH_FACTOR * cache), dtype=torch.uint8, device=device)
        flush.zero_()
        flush_us = max(_device_us(lambda: [flush.zero_() for _ in range(4)]) / 4, 1.0)
    host_us: dict[BoxedCall, float] = {}

    def sample(call: BoxedCall, sets: Sequence[list[Any]]) -> float:
        boxes = [list(inputs) for inputs in sets]
        flushes = min(MAX_FLUSHES, 2 + math.ceil(host_us.get(call, 0.0) / flush_us))

        def calls() -> None:
            began = time.perf_counter_ns()
            for box in boxes:
                call(box)
            host_us[call] = (time.perf_counter_ns() - began) / 1e3

        with torch.cuda.device(device):
            for _ in range(flushes):
                flush.zero_()
            return _device_us(calls) / len(boxes)

    return sample


def _device_us(work: Callable[[], object]) -> float:
    """Return the microseconds that the device takes for some work."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
