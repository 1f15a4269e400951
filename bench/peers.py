"""fusec beside what a user would pick instead: `python -m bench.peers`, by `make bench-peers`.

Inference in f32: fusec and fusec with `freeze`, eager, Inductor and Inductor with `freezing`,
OpenVINO, ONNX Runtime. Training: fusec, eager, Inductor. A row is measured in a process of its own
(`bench.peers_child`), with caches of its own, so that compiles are cold: all peers are compiled
and checked against fp64, then timed in three interleaved runs. A peer that fails has its message
in the place of its numbers. If one ends the process, the row begins again without it.

Where other programs cannot be stopped, `--clock cpu --threads 1` counts CPU-seconds of one thread,
which they hardly change; of several threads, those that wait would count.

With `--busy N` each row is timed a second time beside N endless programs of one thread.
Prints what `bench.peers_report` makes of the record, which is complete after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from bench import peers_report, record
from bench.peers_child import CLOCKS
from bench.workload import Workload
from bench.workloads import deployed

LIMIT_S = 1800.0
"""Seconds after which a row's process is ended, and what it was compiling has failed."""
Measure: TypeAlias = Callable[[Workload, list[str], argparse.Namespace], dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    named = options.only.lower()
    chosen = [w for w in deployed.rows() if named in f"{w.group} {w.label}".lower()]
    if not chosen:
        print(f"no row has {options.only!r} in its name; there are:", file=sys.stderr)
        print("\n".join(f"  {w.group} {w.label}" for w in deployed.rows()), file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    kept = {
        name: value
        for name, value in vars(options).items()
        if name not in ("out", "cache", "resume")
    }
    kind = "peers-busy" if options.busy else "peers"
    before = results_in(options.out / f"{kind}.json") if options.resume else []
    run = record.Record(kind, options.out, **kept)
    for row in before:
        run.add(row)
    for place, workload in enumerate(chosen):
        if any((row["name"], row["mode"]) == (workload.name, mode_of(workload)) for row in before):
            continue
        print(f"{place + 1}/{len(chosen)} {workload.label} ...", file=sys.stderr, flush=True)
        for row in rows(workload, options, in_process):
            run.add(row)
    print(peers_report.report(run.data["results"]))
    print(f"numbers: {run.path}")
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    found.add_argument("--only", default="", help="measure rows with this text in their name")
    found.add_argument("--quick", action="store_true", help="small sizes, few rounds: a check")
    found.add_argument("--rounds", type=int, default=15, help="in each run (default %(default)s)")
    found.add_argument("--runs", type=int, default=3, help="of each row (default %(default)s)")
    found.add_argument("--threads", type=int, default=2, help="of each peer (default %(default)s)")
    found.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of this process")
    found.add_argument("--busy", type=int, default=0, help="time beside so many programs, too")
    found.add_argument("--peers", default="", help="who is measured; default: each row's own")
    found.add_argument("--resume", action="store_true", help="keep what the record has, add to it")
    found.add_argument("--cache", type=Path, help="of compiles, kept; default: none, all are cold")
    found.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    return found


def results_in(path: Path) -> list[dict[str, Any]]:
    """Return the results of a record, none if there is no such file."""
    return json.loads(path.read_text())["results"] if path.exists() else []


def rows(workload: Workload, options: argparse.Namespace, measure: Measure) -> list[dict[str, Any]]:
    """Return a workload's results: quiet, and beside other programs if that is asked for.

    A peer that ends the process while it compiles is left out, and all others begin again; if the
    process ends later, all have failed.

    Args:
        measure: returns what `bench.peers_child` tells, and `ended`, the reason, if it came to no
            good end.
    """
    left = [*filter(None, options.peers.split(","))] or list(workload.peers)
    lost: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"shapes": [], "loads": {"0": {}}, "others": {}}
    while left:
        told = measure(workload, left, options)
        if "ended" not in told:
            found = told
            break
        blamed = [told["current"]] if told.get("current") else left
        lost |= {peer: {"failed": told["ended"]} for peer in blamed}
        left = [peer for peer in left if peer not in blamed]
    return [
        {
            "group": f"{workload.group} {mode_of(workload)}",
            "name": workload.name,
            "mode": mode_of(workload),
            "dtype": workload.dtype,
            "shapes": found["shapes"],
            "busy": int(load),
            "others": found["others"].get(load),
            **peers_report.compared({**measured, **lost}),
        }
        for load, measured in found["loads"].items()
    ]


def mode_of(workload: Workload) -> str:
    return "training" if workload.train else "forward"


def in_process(workload: Workload, peers: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, as `rows` wants it."""
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache.resolve() if options.cache else Path(folder)
        threads = str(options.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "bench.peers_child", workload.label, str(result)]
        command += ["--peers", ",".join(peers), "--cache", str(cache)]
        command += ["--rounds", str(options.rounds)]
        command += ["--runs", str(options.runs), "--threads", threads]
        command += ["--clock", options.clock]
        command += ["--busy", str(options.busy), *(["--quick"] if options.quick else [])]
        reason = ended(command, environment)
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        return {**found, "ended": reason} if reason else found


def ended(command: list[str], environment: dict[str, str]) -> str:
    """Run a process; return why it came to no good end, or nothing if it did."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S:.0f} s"
    if not done.returncode:
        return ""
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    return f"exit code {done.returncode}: {last[0][:300]}"


if __name__ == "__main__":
    sys.exit(main())
