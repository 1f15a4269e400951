"""Times and ceilings of a CUDA device.

GPU time is taken from a CUDA graph of many launches that rotates over input sets too large for the
L2 cache together, so that every launch finds its inputs in memory; where a peer cannot be captured,
CUDA events around plain launches are used and the result says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from bench.timing import quiet, summary
from fusec.driver.race import race_lock

ROTATION_BYTES = 160 * 2**20  # over 2.5 times the L2 cache of an H200


def alone() -> AbstractContextManager[Any]:
    """Return the lock under which one process of a machine times, or races, on its device."""
    return race_lock(torch.device("cuda"))


def sets_needed(nbytes: int) -> int:
    """How many input sets of this many bytes each are rotated over."""
    return max(2, min(32, -(-ROTATION_BYTES // max(nbytes, 1))))


Sampler: TypeAlias = Callable[[], float]
"""Takes a sample: the seconds of one call on the device."""


def gpu_times(steps: Sequence[Callable[[], Any]], *, replays: int = 7) -> tuple[list[float], str]:
    """Seconds of one call on the device, one sample a replay, and how they were taken."""
    ((samples, how),) = interleaved({"": steps}, rounds=replays).values()
    return samples, how


def interleaved(
    peers: Mapping[str, Sequence[Callable[[], Any]]], *, rounds: int = 9
) -> dict[str, tuple[list[float], str]]:
    """Return `gpu_times` of each peer: samples in turn, so that clocks and heat hit all alike."""
    samplers = {peer: _sampler(steps) for peer, steps in peers.items()}
    samples: dict[str, list[float]] = {peer: [] for peer in peers}
    for _ in range(rounds):
        for peer, (sample, _) in samplers.items():
            samples[peer].append(sample())
    return {peer: (samples[peer], how) for peer, (_, how) in samplers.items()}


def _sampler(steps: Sequence[Callable[[], Any]], target_s: float = 0.02) -> tuple[Sampler, str]:
    """Return what samples by a CUDA graph, or else by events, and its name."""
    launches = _launches(steps, target_s)
    try:
        return _graph_sampler(steps, launches), "cuda graph"
    except RuntimeError as error:
        torch.cuda.synchronize()
        reason = str(error).splitlines()[0][:120]
        return _event_sampler(steps, launches), f"events: {reason}"


def _launches(steps: Sequence[Callable[[], Any]], target_s: float) -> int:
    """A multiple of the number of sets that fills about `target_s` seconds."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for step in steps:
        step()
    torch.cuda.synchronize()
    once = (time.perf_counter() - start) / len(steps)
    rounds = max(1, round(target_s / max(once, 1e-6) / len(steps)))
    return len(steps) * min(rounds, 50)


def _graph_sampler(steps: Sequence[Callable[[], Any]], launches: int) -> Sampler:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps[:2]:
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The last results of each set stay alive, so that outputs rotate through memory as inputs do.
    kept: list[Any] = [None] * len(steps)
    with torch.cuda.graph(graph):
        for i in range(launches):
            kept[i % len(steps)] = steps[i % len(steps)]()
    graph.replay()
    torch.cuda.synchronize()

    def sample() -> float:
        assert kept
        return _between_events(graph.replay) / launches

    return sample


def _event_sampler(steps: Sequence[Callable[[], Any]], launches: int) -> Sampler:
    def all_launches() -> None:
        for i in range(launches):
            steps[i % len(steps)]()

    return lambda: _between_events(all_launches) / launches


def _between_events(work: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def host_seconds(
    step: Callable[[], Any], calls: int = 50, wait: Callable[[], None] = torch.cuda.synchronize
) -> float:
    """What the host spends on one call that finds the device idle, and does not wait for it.

    The driver queues some thousand launches. Calls that follow one another fill it, and the next
    launch waits for the device: 20 of 50 training steps of 50 launches and 12 ms each fitted, and
    the others made 6.9 ms of the host's time (H100, 2026-11-26).
    """
    for _ in range(3):
        step()
    spent = 0.0
    with quiet():
        for _ in range(calls):
            wait()
            start = time.perf_counter()
            step()
            spent += time.perf_counter() - start
    wait()
    return spent / calls


def peak_bytes(step: Callable[[], Any]) -> int:
    """Memory that one call needs at once, above what is there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ceilings() -> dict[str, float]:
    """What the device reaches: bytes a second, read and written; bf16 operations.

    Of a copy and of a kernel that copies, the faster one: on an H100 a copy of 1 GiB reached 2.44
    TB/s, and kernels 2.96 (2026-11-26).
    """
    source = torch.empty(2**29, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    passes = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    copy = min((gpu_times([one])[0] for one in passes), key=lambda t: summary(t, "s")["median_s"])
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product, _ = gpu_times([lambda: a @ b])
    return {
        "copy_bytes_per_s": 2 * source.nbytes / summary(copy, "s")["median_s"],
        "matmul_flops_per_s": 2 * 8192**3 / summary(product, "s")["median_s"],
    }
