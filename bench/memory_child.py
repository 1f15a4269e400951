"""One fresh process of `bench.memory`: compile a workload for some peers, and print their peaks."""

from __future__ import annotations

import argparse
import json
import sys

import torch

from bench import memory, workloads
from bench.workload import Workload, compiled, cotangents_of, step_of


def main() -> int:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    (workload,) = (w for w in workloads.cpu() if w.label == options.label)
    print(json.dumps(peaks(workload, options.peers.split(","), shrink=options.shrink)))
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench.memory_child", description=__doc__)
    found.add_argument("label")
    found.add_argument("peers")
    found.add_argument("--shrink", type=int, default=1)
    found.add_argument("--threads", type=int, default=torch.get_num_threads())
    return found


def peaks(workload: Workload, peers: list[str], *, shrink: int) -> dict[str, float]:
    """Return the peak of a step in MiB for each peer that runs."""
    case = workload.case(shrink=shrink)
    cotangents = cotangents_of(case) if workload.train else None
    found = {}
    for peer in peers:
        step = step_of(case, compiled(case.call, peer), cotangents)
        try:
            step(), step()  # what compiles, and what is allocated once and for all
        except Exception as error:  # said where the peer is timed
            print(f"{peer}: {error}", file=sys.stderr)
            continue
        peak = memory.peak_mib(step)
        if peak is not None:
            found[peer] = round(peak, 1)
    return found


if __name__ == "__main__":
    sys.exit(main())
