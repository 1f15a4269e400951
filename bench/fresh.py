"""Whether each fresh cache gets a step that is faster than eager's: `python -m bench.fresh`.

A UNet in training (``workloads/unet.py``), forward, backward and AdamW. Processes of their own,
each with a cache of its own, compile it and time its step in turn with eager's. A row says the
median of both, their ratio, how long the first step took and a digest of what was compiled: equal
digests are equal choices of memory formats, libraries and kernels. Bars: each ratio at least 1.1,
and all within 5 %: ratios, for machines change in between.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench import record, timing
from bench.workload import backend_of
from bench.workloads.unet import denoiser

LEAST, SPREAD = 1.1, 0.05


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fresh", description=__doc__)
    parser.add_argument("--caches", type=int, default=10, help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="narrow, few rounds: a check")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measure(quick=options.quick)))
        return 0
    run = record.Record("fresh", options.out, quick=options.quick, peers=["eager", "fusec"])
    rows = []
    for number in range(options.caches):
        row = in_a_process(quick=options.quick)
        rows.append(row)
        peers = {"eager": row["eager"], "fusec": {**row["fusec"], "compile_s": row["compile_s"]}}
        run.add({"group": "unet", "name": f"cache {number}", "mode": "training", "peers": peers,
                 "choices": row["choices"], "ratios": {"eager/fusec": row["ratio"]}})  # fmt: skip
        print(f"{number}: eager {row['eager']['median_ms']:.1f} ms, fusec "
              f"{row['fusec']['median_ms']:.1f} ms, {row['ratio']:.3f} times as fast; first step "
              f"{row['compile_s']:.1f} s; choices {row['choices']}", flush=True)  # fmt: skip
    ratios = sorted(row["ratio"] for row in rows)
    spread = (ratios[-1] - ratios[0]) / statistics.median(ratios)
    common = Counter(row["choices"] for row in rows).most_common(1)[0][1]
    print(f"least {ratios[0]:.3f} (bar {LEAST}), spread {spread:.1%} (bar {SPREAD:.0%}), the same "
          f"choices in {common} of {len(rows)}")  # fmt: skip
    print(f"numbers: {run.path}")
    return 0 if ratios[0] >= LEAST and spread <= SPREAD else 1


def in_a_process(*, quick: bool) -> dict[str, Any]:
    """Return what a process with an empty cache measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.fresh", "--child", *["--quick"] * quick]
        done = subprocess.run(
            command,
            env={**os.environ, "FUSEC_CACHE_DIR": folder},
            stdout=subprocess.PIPE,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(*, quick: bool) -> dict[str, Any]:
    """Time the step of eager and of fusec in turn, in this process."""
    started = time.perf_counter()
    steps = {"fusec": step(compiled=True, quick=quick)}
    steps["fusec"]()
    compile_s = time.perf_counter() - started
    steps["eager"] = step(compiled=False, quick=quick)
    samples = timing.interleaved(steps, rounds=5 if quick else 41, budget=30.0)
    return {
        **{peer: timing.summary(values) for peer, values in samples.items()},
        "ratio": round(timing.paired_ratio(samples["eager"], samples["fusec"]), 4),
        "compile_s": round(compile_s, 2),
        "choices": choices(),
    }


def step(*, compiled: bool, quick: bool) -> Callable[[], None]:
    """Return a step of training."""
    torch.manual_seed(0)
    batch = 1 if quick else 4
    images, steps = torch.randn(batch, 3, 32, 32), torch.randint(0, 1000, (batch,))
    noise = torch.randn_like(images)
    model, called = denoiser((16, 16, 16) if quick else (32, 64, 64))
    made = torch.compile(model, backend=backend_of("fusec"), dynamic=False) if compiled else model
    predict = called(made)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def run() -> None:
        F.mse_loss(predict(images, steps), noise).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def choices() -> str:
    """Return a digest of what this process has compiled."""
    from fusec.driver.compiler import RECENT  # local: the process of the table compiles nothing

    text = "".join(f"{trace.wrapper}{trace.manifest!r}" for trace in RECENT)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


if __name__ == "__main__":
    sys.exit(main())
