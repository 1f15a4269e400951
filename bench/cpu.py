"""Eager, Inductor and fusec on this machine's CPU: `python -m bench.cpu [--only NAME] [--quick]`.

Each row is one workload, forward or training: peers are compiled first, checked against fp64, then
timed in interleaved rounds within one process and with one number of threads. Then one step of
each is measured for its peak of memory, above what was held before it, in another process. The
numbers of a peer that fails are replaced by its message; the others are measured all the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import memory, record, timing, workloads
from bench.accuracy import relative_error, within_rule
from bench.workload import (
    Case,
    Workload,
    bytes_floor,
    compiled,
    cotangents_of,
    in_double,
    step_of,
)


def main(
    arguments: list[str] | None = None, peaks: Callable[..., Mapping[str, float]] = memory.peaks
) -> int:
    """Run the command; ``peaks`` measures memory, as of `memory`."""
    options = parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen = [w for w in workloads.cpu() if options.only.lower() in f"{w.group} {w.label}".lower()]
    if not chosen:
        print(f"no workload has {options.only!r} in its name; there are:", file=sys.stderr)
        print("\n".join(f"  {w.label}" for w in workloads.cpu()), file=sys.stderr)
        return 2
    peers = tuple(filter(None, options.peers.split(",")))
    shrink, rounds, budget = (8, 5, 0.2) if options.quick else (1, 41, options.seconds)
    settings = {"rounds": rounds, "seconds": budget, "quick": options.quick, "peers": peers}
    run = record.Record("cpu", options.out, **settings)
    for workload in chosen:
        print(f"{workload.label} ...", file=sys.stderr, flush=True)
        how = {"shrink": shrink, "rounds": rounds, "budget": budget, "peaks": peaks}
        run.add(measure(workload, peers or workload.peers, **how))
    print(record.table(run.data))
    if record.plot(run.data, options.out / "cpu.png"):
        print(f"plot: {options.out / 'cpu.png'}")
    print(f"numbers: {run.path}")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    found.add_argument("--only", default="", help="measure workloads with this text in their name")
    found.add_argument("--quick", action="store_true", help="small sizes, few rounds: a check")
    found.add_argument("--seconds", type=float, default=6.0, help="of timing, for each workload")
    found.add_argument("--threads", type=int, default=0, help="torch's threads; 0: its default")
    found.add_argument("--peers", default="", help="who is measured; default: each row's own")
    found.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    return found


def measure(
    workload: Workload,
    peers: Sequence[str],
    *,
    shrink: int,
    rounds: int,
    budget: float,
    peaks: Callable[..., Mapping[str, float]],
) -> dict[str, Any]:
    """One row of the results; see `record`."""
    torch._dynamo.reset()
    case = workload.case(shrink=shrink)
    cotangents = cotangents_of(case) if workload.train else None
    reference = exact(case, cotangents)
    eager = step_of(case, case.call, cotangents)()
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for peer in peers:
        found[peer], step = first_call(
            lambda peer=peer: step_of(case, compiled(case.call, peer), cotangents), eager, reference
        )
        if step is not None:
            steps[peer] = step
    floor = bytes_floor(case, eager, train=workload.train)
    del eager, reference
    samples = timing.interleaved(steps, rounds=rounds, budget=budget)
    for peer, values in samples.items():
        found[peer].update(timing.summary(values))
    for peer, peak in peaks(workload.label, list(steps), shrink=shrink).items():
        found[peer]["peak_mib"] = peak
    return {
        "group": workload.group,
        "name": workload.name,
        "mode": "training" if workload.train else "forward",
        "dtype": workload.dtype,
        "shapes": [list(t.shape) for t in case.inputs],
        "bytes_floor": floor,
        "peers": found,
        "ratios": ratios(samples),
    }


def exact(case: Case, cotangents: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...]:
    """Results in fp64, by eager."""
    wide = in_double(case)
    return step_of(wide, wide.call, cotangents and tuple(c.double() for c in cotangents))()


Step = Callable[[], tuple[torch.Tensor, ...]]


def first_call(
    make: Callable[[], Step],
    eager: tuple[torch.Tensor, ...],
    reference: tuple[torch.Tensor, ...],
) -> tuple[dict[str, Any], Step | None]:
    """Compile by calling once: seconds and error against fp64, or why it failed and no step."""
    start = time.perf_counter()
    try:
        step = make()
        outputs = step()
    except Exception as error:  # whatever a peer raises is its result, not the end of the run
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}, None
    found = {
        "compile_s": round(time.perf_counter() - start, 3),
        "error": relative_error(outputs, reference),
        "accurate": within_rule(eager, outputs, reference),
    }
    return found, step


def ratios(samples: dict[str, list[float]]) -> dict[str, float]:
    """How many times faster fusec is than each other peer; those that freeze meet each other."""
    return {
        f"{peer}/{own}": round(timing.paired_ratio(values, samples[own]), 4)
        for own, frozen in (("fusec", False), ("fusec-freeze", True))
        if own in samples
        for peer, values in samples.items()
        if peer != own and (frozen or "freez" not in peer)
    }


if __name__ == "__main__":
    sys.exit(main())
