"""One row of the GPU benchmark: peers compiled, checked against fp64, timed; or rehearsed on a CPU.

A row is what `record` describes, with more of each peer (`gpu`'s docstring names it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bench import gpu_timing
from bench.accuracy import relative_error, within_rule
from bench.cpu import exact, first_call
from bench.timing import summary
from bench.workload import Case, Workload, bytes_floor, compiled, cotangents_of, step_of
from fusec.options import Options
from fusec.runtime.cache.store import open_cache
from fusec.runtime.race.verdicts import Verdict, all_verdicts

Step = Callable[[], tuple[torch.Tensor, ...]]
SHRINK = 64  # of a rehearsal's sizes


@dataclasses.dataclass
class _Row:
    """A row while it is measured."""

    workload: Workload
    cases: list[Case]
    cotangents: list[tuple[torch.Tensor, ...] | None]
    eager: tuple[torch.Tensor, ...]
    reference: tuple[torch.Tensor, ...]
    found: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    samples: dict[str, list[float]] = dataclasses.field(default_factory=dict)


def rehearse(workload: Workload) -> dict[str, Any]:
    """Go through a row at tiny sizes on a CPU, without a clock."""
    row = _begin(workload, "cpu", SHRINK)
    for peer in workload.peers:
        _first_calls(row, peer, {})
    if row.cases[0].bare is not None:
        row.cases[0].bare(*row.cases[0].inputs)
    return row_of(workload, row.found)


def compare(
    workload: Workload,
    device: str,
    peer: str,
    options: Mapping[str, Any],
    *,
    dynamic: bool = False,
    calls: int = 3,
) -> dict[str, Any]:
    """Return how far a peer's results are from fp64, without a clock.

    Args:
        calls: how many, of which the last is compared: a capture replays from the third one.
    """
    row = _begin(workload, device, 2)
    case, cotangents = row.cases[0], row.cotangents[0]
    step = step_of(case, compiled(case.call, peer, options, dynamic=dynamic), cotangents)

    def several() -> tuple[torch.Tensor, ...]:
        for _ in range(calls - 1):
            step()
        return step()

    found, _ = first_call(lambda: several, row.eager, row.reference)
    settle()
    return found


def settle() -> None:
    """Wait for the device.

    Raises:
        RuntimeError: if a fault has lost its context: this process can do nothing more with it.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def release() -> None:
    """Give back the memory of a row that was measured: other children need it."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _verdicts() -> dict[str, Verdict]:
    return all_verdicts(open_cache(Options.from_compile(None, None)))


def _new(known: Mapping[str, Verdict]) -> list[dict[str, Any]]:
    """Return the verdicts that were reached since others were known."""
    return [v.to_dict() for key, v in _verdicts().items() if known.get(key) != v]


def kernel_times(step: Step) -> dict[str, float]:
    """Return microseconds of each kernel of one step on the device, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.events() or ():
        spent = getattr(event, "device_time_total", None) or getattr(event, "cuda_time_total", 0)
        if spent:
            found[event.name] = found.get(event.name, 0.0) + float(spent)
    return found


def measure(
    workload: Workload,
    ceilings: Mapping[str, float],
    deadline: float,
    *,
    race_seconds: float,
    progress: Callable[[dict[str, Any]], None],
    device: str = "cuda",
    shrink: int = 1,
    clock: Any = gpu_timing,
) -> dict[str, Any]:
    """Measure a row on the device.

    Args:
        ceilings: bytes and operations a second that the device reaches.
        deadline: when compiling stops, on the monotonic clock.
        progress: gets the row after each peer.
        clock: has the functions of `gpu_timing`.
    """
    with clock.alone():
        row = _begin(workload, device, shrink)
        settle()
    floor_s, known = _floor(row, ceilings), _verdicts()
    ready: dict[str, list[Step]] = {}
    for peer in workload.peers:
        left = min(deadline - time.monotonic(), 20 + 3 * workload.seconds + race_seconds)
        if left < 1:
            row.found[peer] = {"failed": "no time was left"}
            continue
        budget = {"race_budget_s": race_seconds} if peer == "fusec" else {}
        try:
            with _at_most(left):
                steps = _first_calls(row, peer, budget)
        except TimeoutError as error:
            row.found[peer], steps = {"failed": str(error)}, []
        settle()
        if steps:
            ready[peer] = steps
        progress(row_of(workload, row.found))
    with clock.alone():
        _time_all(row, ready, floor_s, clock)
        result = row_of(workload, row.found)
        result |= {"input_sets": len(row.cases), "floor_us": round(floor_s * 1e6, 2)}
        result["ratios"], result["races"] = ratios(row.samples), _new(known)
        progress(result)
        if "fusec" in ready and _device(row) == "cuda":
            with contextlib.suppress(RuntimeError):  # no profiler costs no row
                result["kernel_us"] = kernel_times(ready["fusec"][0])
        return result | _bare(row, clock)


def _device(row: _Row) -> str:
    return row.cases[0].inputs[0].device.type


def _begin(workload: Workload, device: str, shrink: int) -> _Row:
    torch._dynamo.reset()
    cases = input_sets(workload, device, shrink)
    cotangents = [cotangents_of(case) if workload.train else None for case in cases]
    eager = step_of(cases[0], cases[0].call, cotangents[0])()
    try:
        reference = exact(cases[0], cotangents[0])
    except torch.OutOfMemoryError:
        reference = tuple(t.double() for t in eager)
    return _Row(workload, cases, cotangents, eager, reference)


def _first_calls(row: _Row, peer: str, options: Mapping[str, Any]) -> list[Step]:
    """Compile for a peer, check the first and the last set; return its steps, none if it failed."""
    try:
        call = compiled(row.cases[0].call, peer, options)
    except Exception as error:
        row.found[peer] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        return []
    pairs = zip(row.cases, row.cotangents, strict=True)
    steps = [step_of(case, call, cotangents) for case, cotangents in pairs]
    row.found[peer], step = first_call(lambda: steps[0], row.eager, row.reference)
    if step is None:
        return []
    row.found[peer] |= rotated_accuracy(row.cases[-1], row.cotangents[-1], steps[-1])
    return steps


def input_sets(workload: Workload, device: str, shrink: int) -> list[Case]:
    """Cases with different values that share one function, more than the L2 cache holds."""
    first = workload.case(device, shrink=shrink)
    count = gpu_timing.sets_needed(sum(t.nbytes for t in first.inputs)) if shrink == 1 else 2
    others = (workload.case(device, shrink=shrink, seed=seed) for seed in range(1, count))
    return [first, *(dataclasses.replace(first, inputs=case.inputs) for case in others)]


def rotated_accuracy(
    case: Case, cotangents: tuple[torch.Tensor, ...] | None, step: Step
) -> dict[str, Any]:
    """Check the last input set as well: a kernel must not remember the pointers of the first."""
    eager = step_of(case, case.call, cotangents)()
    outputs, wide = step(), tuple(t.double() for t in eager)
    again = relative_error(outputs, wide)
    if within_rule(eager, outputs, wide) or again < 0.02:
        return {}
    return {"accurate": False, "error_of_last_set": again}


def _floor(row: _Row, ceilings: Mapping[str, float]) -> float:
    """Seconds that the bytes, or the operations of the products, take at the device's best."""
    case, train = row.cases[0], row.workload.train
    moved = bytes_floor(case, row.eager, train=train)
    operations = case.flops * (1 + case.backward if train else 1)
    return max(moved / ceilings["copy_bytes_per_s"], operations / ceilings["matmul_flops_per_s"])


def _time_all(row: _Row, ready: Mapping[str, Sequence[Step]], floor_s: float, clock: Any) -> None:
    """Add times and memory to the peers' entries, and their samples in seconds to the row."""
    for peer, steps in ready.items():
        row.found[peer]["peak_mib"] = round(clock.peak_bytes(steps[0]) / 2**20, 1)
    for peer, (values, how) in clock.interleaved(ready).items():
        row.samples[peer] = values
        row.found[peer].update(summary(values, "us"), timer=how)
        row.found[peer]["of_floor"] = round(floor_s / median(values), 4)
    for peer, steps in ready.items():
        row.found[peer]["host_us"] = round(clock.host_seconds(steps[0]) * 1e6, 2)


def _bare(row: _Row, clock: Any) -> dict[str, Any]:
    """Time the row's products alone, and say how much longer fusec takes with all the rest."""
    bare = row.cases[0].bare
    if bare is None:
        return {}
    with torch.no_grad():
        steps = [lambda case=case: bare(*case.inputs) for case in row.cases]
        values, _ = clock.gpu_times(steps)
    found = {"bare_us": round(median(values) * 1e6, 3)}
    if "fusec" in row.samples:
        found["over_bare"] = round(median(row.samples["fusec"]) / median(values), 4)
    return found


def ratios(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """How many times faster fusec is than each other compiler, and than the fastest of them."""
    if "fusec" not in samples:
        return {}
    own = median(samples["fusec"])
    others = {p: median(v) / own for p, v in samples.items() if not p.startswith("fusec")}
    best = {"best": min(others.values())} if others else {}
    return {f"{peer}/fusec": round(ratio, 4) for peer, ratio in (others | best).items()}


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds; only the main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def row_of(workload: Workload, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "group": workload.group,
        "name": workload.name,
        "mode": "training" if workload.train else "forward",
        "dtype": workload.dtype,
        "peers": found,
        "ratios": {},
    }


def median(values: list[float]) -> float:
    return float(summary(values, "s")["median_s"])
