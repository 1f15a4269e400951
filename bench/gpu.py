"""Eager, Inductor and fusec on an NVIDIA GPU: `python -m bench.gpu [--minutes 9]`.

In order, within the minutes given: the tests marked `gpu`; what the device reaches at copies and
products; memory-bound chains forward, then training; a block forward and backward; the ceilings
again. The JSON is complete after each measurement, so a run that is cut short loses one row. GPU
time in microseconds is from CUDA graphs over rotating inputs (`gpu_timing`); `host_us` is what one
call costs the host; `of_floor` is the time that the bytes alone would take over the time taken.

Not measured yet: products with epilogues, decoding, attention, `max-autotune`, Liger's kernels.

`--dry-run` goes through all of it on a CPU with tiny shapes, and times nothing.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import gpu_timing, record, workloads
from bench.accuracy import relative_error, within_rule
from bench.cpu import exact, first_call
from bench.timing import summary
from bench.workload import (
    PEERS,
    Case,
    Workload,
    bytes_floor,
    compiled,
    cotangents_of,
    step_of,
)

ROOT = Path(__file__).resolve().parent.parent
RESERVE_S = 20.0  # kept for the ceilings at the end and the table
ROW_S = 15.0  # no row is started with less than this left


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device here; --dry-run goes through the script on a CPU", file=sys.stderr)
        return 4
    deadline = time.monotonic() + 60 * options.minutes
    peers = options.peers.split(",")
    run = record.Record(
        "gpu", options.out, minutes=options.minutes, dry_run=options.dry_run, peers=peers
    )
    if not options.skip_tests:
        run.note("tests", gpu_tests(options.out, limit_s=20 * options.minutes))
    run.note("ceilings", {} if options.dry_run else {"start": gpu_timing.ceilings()})
    chosen = [w for w in workloads.gpu() if options.only.lower() in w.label.lower()]
    left_out = measure_all(run, chosen, peers, deadline, dry_run=options.dry_run)
    run.note("left_out", left_out)
    if not options.dry_run:
        run.note("ceilings", {**run.data["ceilings"], "end": gpu_timing.ceilings()})
    run.note("verdict", verdict(run.data["summary"]))
    print(record.table(run.data, unit="us"))
    for line in closing_lines(run.data):
        print(line)
    record.plot(run.data, options.out / "gpu.png")
    print(f"numbers: {run.path}")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    found.add_argument("--minutes", type=float, default=9.0, help="for everything")
    found.add_argument("--only", default="", help="measure workloads with this text in their name")
    found.add_argument("--peers", default=",".join(PEERS), help="default %(default)s")
    found.add_argument("--skip-tests", action="store_true", help="do not run the tests first")
    found.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU, no timing")
    found.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    return found


def gpu_tests(directory: Path, *, limit_s: float) -> dict[str, Any]:
    """Run the tests marked `gpu` in a process of their own; their output goes to gpu-tests.log."""
    log = directory / "gpu-tests.log"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short", "tests/gpu"]
    start = time.monotonic()
    with log.open("w") as stream:
        try:
            code: int | str = subprocess.run(
                command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, timeout=limit_s,
                check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit_s:.0f} s"
    lines = log.read_text().strip().splitlines()
    result = {"exit": code, "seconds": round(time.monotonic() - start, 1), "last": lines[-1:]}
    print(f"tests: {result}", file=sys.stderr, flush=True)
    return result


def measure_all(
    run: record.Record,
    chosen: Sequence[Workload],
    peers: list[str],
    deadline: float,
    *,
    dry_run: bool,
) -> list[str]:
    """Add a row for each workload while time is left; return the names of the others."""
    for i, workload in enumerate(chosen):
        if deadline - time.monotonic() < RESERVE_S + ROW_S:
            return [w.label for w in chosen[i:]]
        print(f"{workload.label} ...", file=sys.stderr, flush=True)
        copy_rate = run.data["ceilings"].get("start", {}).get("copy_bytes_per_s")
        try:
            run.add(measure(workload, peers, copy_rate, dry_run=dry_run))
        except Exception as error:  # one row must not cost the others
            run.add(row_of(workload, {"eager": {"failed": f"{type(error).__name__}: {error}"}}))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return []


def measure(
    workload: Workload, peers: list[str], copy_rate: float | None, *, dry_run: bool
) -> dict[str, Any]:
    """One row: each peer compiled, checked against fp64, then timed on the device and the host."""
    torch._dynamo.reset()
    device, shrink = ("cpu", 64) if dry_run else ("cuda", 1)
    cases = input_sets(workload, device, shrink)
    cotangents = [cotangents_of(case) if workload.train else None for case in cases]
    reference = exact(cases[0], cotangents[0])
    eager = step_of(cases[0], cases[0].call, cotangents[0])()
    floor = bytes_floor(cases[0], eager, train=workload.train)
    found: dict[str, dict[str, Any]] = {}
    samples: dict[str, list[float]] = {}
    for peer in peers:
        try:
            call = compiled(cases[0].call, peer)
        except Exception as error:
            found[peer] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        steps = [step_of(case, call, c) for case, c in zip(cases, cotangents, strict=True)]
        found[peer], step = first_call(lambda steps=steps: steps[0], eager, reference)
        if step is not None:
            found[peer] |= rotated_accuracy(cases[-1], cotangents[-1], steps[-1])
            if not dry_run:
                samples[peer] = timed(found[peer], steps, floor, copy_rate)
    row = row_of(workload, found)
    row["bytes_floor"], row["input_sets"] = floor, len(cases)
    row["ratios"] = {
        f"{peer}/fusec": round(_median(values) / _median(samples["fusec"]), 4)
        for peer, values in samples.items()
        if peer != "fusec" and "fusec" in samples
    }
    return row


def input_sets(workload: Workload, device: str, shrink: int) -> list[Case]:
    """Cases with different values that share one function, more than the L2 cache holds."""
    first = workload.case(device, shrink=shrink)
    count = gpu_timing.sets_needed(sum(t.nbytes for t in first.inputs)) if shrink == 1 else 2
    others = (workload.case(device, shrink=shrink, seed=seed) for seed in range(1, count))
    return [first, *(Case(first.call, case.inputs) for case in others)]


def rotated_accuracy(
    case: Case, cotangents: tuple[torch.Tensor, ...] | None, step: Callable
) -> dict[str, Any]:
    """Check the last input set as well: a kernel must not remember the pointers of the first."""
    eager = step_of(case, case.call, cotangents)()
    outputs = step()
    again = relative_error(outputs, tuple(t.double() for t in eager))
    if within_rule(eager, outputs, tuple(t.double() for t in eager)) or again < 0.02:
        return {}
    return {"accurate": False, "error_of_last_set": again}


def timed(
    found: dict[str, Any], steps: Sequence[Callable], floor: int, copy_rate: float | None
) -> list[float]:
    """Add times to a peer's entry; return its samples in seconds."""
    values, how = gpu_timing.gpu_times(steps)
    found.update(summary(values, "us"), timer=how)
    found["host_us"] = round(gpu_timing.host_seconds(steps[0]) * 1e6, 2)
    if copy_rate:
        found["of_floor"] = round(floor / copy_rate / _median(values), 4)
    return values


def row_of(workload: Workload, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "group": workload.group,
        "name": workload.name,
        "mode": "training" if workload.train else "forward",
        "dtype": workload.dtype,
        "peers": found,
        "ratios": {},
    }


def verdict(groups: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Ahead: geometric mean over 1.03 and no row under 0.95."""

    def judge(s: dict[str, Any]) -> str:
        if s["geomean"] > 1.03 and s["worst"] > 0.95:
            return "ahead"
        return "behind" if s["geomean"] < 0.97 else "mixed"

    return {group: {r: judge(s) for r, s in ratios.items()} for group, ratios in groups.items()}


def closing_lines(data: dict[str, Any]) -> list[str]:
    """Ceilings and their drift, fractions of the floor, what was left out."""
    lines = []
    start, end = (data["ceilings"].get(k, {}) for k in ("start", "end"))
    for name in start:
        drift = abs(end.get(name, math.nan) / start[name] - 1)
        warning = "" if drift < 0.03 else ": repeat the run"
        lines.append(f"{name}: {start[name]:.4g}, drift {drift:.1%}{warning}")
    for result in data["results"]:
        shares = {p: f["of_floor"] for p, f in result["peers"].items() if "of_floor" in f}
        if shares:
            lines.append(f"{result['name']} {result['mode']}: of the floor {shares}")
    if data["left_out"]:
        lines.append(f"left out for lack of time: {', '.join(data['left_out'])}")
    return lines


def _median(values: list[float]) -> float:
    return float(summary(values, "s")["median_s"])


if __name__ == "__main__":
    sys.exit(main())
