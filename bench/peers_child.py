"""One fresh process of `bench.peers`: compile a row for all peers, check them, time them in turn.

The result is JSON that is written anew before each peer is compiled, so that it says who was at
work if the process ends:

    {"shapes", "current": PEER, "loads": {"0": {PEER: {...}}, "N": {PEER: {...}}},
     "others": {"0": CPUS, "N": CPUS}}

by the number of programs beside; a peer's numbers are `record`'s, and `runs_ms`, a median a run.
`others` is how many CPUs other programs had while the row was timed, those N among them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import busy, cpu, timing
from bench.accuracy import within_rule
from bench.compile_child import cpu_seconds
from bench.workload import Case, Workload, compiled, cotangents_of, step_of
from bench.workloads import deployed

BUDGET_S, QUICK_BUDGET_S = 20.0, 0.2
"""Seconds after which a run begins no further round; it has five at least."""
SHRINK = 8
SETS = 5
"""Sets of inputs, in one of which a peer has to be right."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEC_CACHE_DIR")
AT_LEAST_S, BUSY_AT_LEAST_S = 0.01, 0.05
"""Seconds of a sample: beside other programs, several time slices of the kernel's."""


def main() -> int:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    (workload,) = (w for w in deployed.rows() if w.label == options.label)
    measure(
        workload, options.peers.split(","), options,
        lambda found: options.result.write_text(json.dumps(found)),
    )  # fmt: skip
    return 0


def measure(
    workload: Workload,
    peers: list[str],
    options: argparse.Namespace,
    tell: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Return what is told at last: before each peer's compile, and when all is done.

    Args:
        options: ``quick``, ``rounds``, ``runs``, ``clock``, ``busy`` and ``cache``, a folder.
    """
    found: dict[str, Any] = {}

    def begin(peer: str) -> None:
        found["current"] = peer
        tell(found)
        for name in CACHES:  # what another peer left would make a compile warm
            os.environ[name] = str(options.cache / peer / name)

    steps, ready, found["shapes"] = prepare(workload, peers, SHRINK if options.quick else 1, begin)
    found["current"] = None
    tell(found)
    found["loads"], found["others"] = {}, {}
    for load in dict.fromkeys((0, options.busy)):
        with busy.beside(load):
            others = busy.Others()
            times = timed(steps, options, BUSY_AT_LEAST_S if load else AT_LEAST_S)
            found["others"][str(load)] = others.cpus()
        merged = {peer: {**numbers, **times.get(peer, {})} for peer, numbers in ready.items()}
        found["loads"][str(load)] = merged
    tell(found)
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench.peers_child", description=__doc__)
    found.add_argument("label")
    found.add_argument("result", type=Path)
    found.add_argument("--peers", required=True)
    found.add_argument("--cache", type=Path, required=True, help="of compiles, a folder a peer")
    found.add_argument("--quick", action="store_true")
    found.add_argument("--clock", choices=CLOCKS, required=True)
    for name in ("rounds", "runs", "threads", "busy"):
        found.add_argument(f"--{name}", type=int, required=True)
    return found


def prepare(
    workload: Workload, peers: list[str], shrink: int, begin: Callable[[str], None]
) -> tuple[dict[str, cpu.Step], dict[str, dict[str, Any]], list[list[int]]]:
    """Return the steps of those that run, what each one's first call was like, the inputs' shapes.

    Args:
        begin: is called before a peer's first call, with its name.
    """
    case = workload.case(shrink=shrink)
    cotangents = cotangents_of(case) if workload.train else None
    reference = cpu.exact(case, cotangents)
    eager = step_of(case, case.call, cotangents)()
    steps, found = {}, {}
    for peer in peers:
        begin(peer)
        before = cpu_seconds()
        found[peer], step = cpu.first_call(
            lambda peer=peer: step_of(case, compiled(case.call, peer), cotangents), eager, reference
        )
        if step is not None:
            found[peer]["compile_cpu_s"] = round(cpu_seconds() - before, 3)
            steps[peer] = step
    del eager, reference
    for seed in range(1, SETS):
        wrong = [peer for peer in steps if not found[peer]["accurate"]]
        if not wrong:
            break
        refill(case, workload.case(shrink=shrink, seed=seed))
        reference = cpu.exact(case, cotangents)
        eager = step_of(case, case.call, cotangents)()
        for peer in wrong:
            found[peer]["accurate"] = within_rule(eager, steps[peer](), reference)
    return steps, found, [list(x.shape) for x in case.inputs]


@torch.no_grad()
def refill(case: Case, other: Case) -> None:
    """Give a case the inputs of another one, in place, and keep its weights.

    A value within rounding of a kink (ReLU, a maximum) has its gradient on either side: a peer
    that is right may miss the rule for some inputs, one that is wrong misses it for others too. Of
    a million such values some are that close for most inputs, so there are several sets.
    """
    for x, y in zip(case.inputs, other.inputs, strict=True):
        x.copy_(y)


def timed(
    steps: dict[str, cpu.Step], options: argparse.Namespace, at_least: float
) -> dict[str, dict[str, Any]]:
    """Return the times of all peers: of all samples, and the median of each run."""
    budget = QUICK_BUDGET_S if options.quick else BUDGET_S
    settings = {"rounds": options.rounds, "budget": budget, "at_least": at_least, "apart": True}
    settings["clock"] = CLOCKS[options.clock]
    runs = [timing.interleaved(steps, **settings) for _ in range(options.runs)]
    found = {}
    for peer in steps:
        samples = [value for run in runs for value in run[peer]]
        medians = [round(statistics.median(run[peer]) * 1e3, 5) for run in runs]
        found[peer] = {
            **timing.summary(samples),
            "best_ms": min(samples) * 1e3,
            "runs_ms": medians,
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
