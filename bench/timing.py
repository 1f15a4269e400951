"""Wall times on a CPU: interleaved rounds, so that a slow second of the machine hits all peers."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def quiet() -> Iterator[None]:
    """Collect garbage now and not again before the block ends."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seconds_of(step: Callable[[], object]) -> float:
    """Wall seconds of one call; its results are freed before the clock stops."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def settle(limit: float = 0.3, glance: float = 0.005) -> None:
    """Wait until no thread of this process runs, at most ``limit`` seconds.

    Threads that have nothing to do spin before they sleep, in case a call comes: torch's for 2 to
    5 ms, ONNX Runtime's for 40 (2026-11-26). Calls of another peer would compete with them. One
    that waits for a core, on a machine that is busy with others' programs, has not come to rest.
    """
    deadline, rests = time.perf_counter() + limit, 0
    while rests < 2 and time.perf_counter() < deadline:
        before = time.process_time()
        time.sleep(glance)
        ran = time.process_time() - before > glance / 10
        rests = 0 if ran or _others_run() else rests + 1


def _others_run() -> bool:
    """Return True if another thread of this process runs or waits for a core, as Linux says."""
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended meanwhile
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state in "RD" and task.name != own:
                return True
    return False


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    budget: float,
    at_least: float = 0.01,
    apart: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a call of each peer, one sample a round: A B C, B C A, C A B, ...

    Args:
        rounds: at most this many; the first five also beyond the budget.
        budget: seconds after which no further round is started.
        at_least: seconds of one sample; a faster call is repeated within it.
        apart: let the others' threads rest before a sample, and call once before its clock starts:
            for peers with threads of their own.
        clock: says the seconds that samples are counted in.
    """
    repeats = {}
    for name, step in steps.items():
        step()  # twice: the first call pays for pages and threads
        step()
        repeats[name] = max(1, round(at_least / max(seconds_of(step), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    deadline = time.perf_counter() + budget
    with quiet():
        for index in range(rounds):
            if index >= 5 and time.perf_counter() > deadline:
                break
            for name in order[index % len(order) :] + order[: index % len(order)]:
                n, step = repeats[name], steps[name]
                if apart:
                    settle()
                    step()
                start = clock()
                for _ in range(n):
                    step()
                samples[name].append((clock() - start) / n)
    return samples


def summary(samples: list[float], unit: str = "ms") -> dict[str, float | int]:
    """Median, 20th and 80th percentile and the number of samples, in the unit."""
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        f"median_{unit}": statistics.median(ordered) * scale,
        f"p20_{unit}": ordered[round(0.2 * last)] * scale,
        f"p80_{unit}": ordered[round(0.8 * last)] * scale,
        "samples": len(ordered),
    }


def paired_ratio(slow: list[float], fast: list[float]) -> float:
    """Median over rounds of slow/fast: both numbers of a pair saw the same machine."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))
