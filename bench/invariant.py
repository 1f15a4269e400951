"""What the same bits in each batch cost: `python -m bench.invariant`.

A layer of GPT-2 (64 tokens a row) and a linear, f32, inference, at several sizes of the batch:
eager, fusec compiled for each size, and fusec under ``batch_invariant``, compiled once for all,
in interleaved rounds within one process. Results must have the same bits as those of the largest
batch.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import fusec
from bench import record, timing
from bench.workload import backend_of
from bench.workloads.blocks import Gpt2Block

BATCHES = (1, 2, 8, 32)
SECONDS = 4.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.invariant", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="narrow, few rounds: a check")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="default %(default)s")
    options = parser.parse_args(arguments)
    width = 64 if options.quick else 768
    run = record.Record("invariant", options.out, quick=options.quick, peers=["eager", "fusec"])
    torch.manual_seed(0)
    rows: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "gpt2 layer": (Gpt2Block(width, width // 64).eval(), (64, width)),
        "linear": (nn.Linear(width, 4 * width).eval(), (width,)),
    }
    for name, (model, shape) in rows.items():
        x = torch.randn(max(BATCHES), *shape)
        named = compiled(model, batch_invariant=True)
        with torch.no_grad():
            whole = named(fusec.name_size(x, 0)).clone()
            for batch in BATCHES:
                part = fusec.name_size(x[:batch].clone(), 0)
                if not torch.equal(named(part), whole[:batch]):
                    raise SystemExit(f"{name}: a batch of {batch} has other bits")
                times = measure(model, named, part, 0.2 if options.quick else SECONDS)
                run.add(row_of(name, batch, times))
    print(f"numbers: {run.path}")
    return 0


def compiled(model: nn.Module, **options: bool) -> Callable[..., torch.Tensor]:
    call: Callable[..., torch.Tensor] = torch.compile(
        model, backend=backend_of("fusec"), fullgraph=True, dynamic=False, options=options
    )
    return call


def measure(
    model: nn.Module, named: Callable[..., torch.Tensor], x: torch.Tensor, seconds: float
) -> dict[str, float]:
    """Return the median milliseconds of each peer's call."""
    own, plain = compiled(model), x.clone()
    steps = {
        "eager": lambda: model(plain),
        "fusec": lambda: own(plain),
        "invariant": lambda: named(x),
    }
    for step in steps.values():
        step()
    with timing.quiet():
        found = timing.interleaved(steps, rounds=200, budget=seconds)
    return {peer: 1e3 * statistics.median(samples) for peer, samples in found.items()}


def row_of(name: str, batch: int, times: dict[str, float]) -> dict[str, object]:
    """Print a row, and return it for the record."""
    shown = ", ".join(f"{peer} {ms:.3g} ms" for peer, ms in times.items())
    ratio = times["fusec"] / times["invariant"]
    print(f"{name}, batch {batch}: {shown}; fusec / invariant {ratio:.2f}", flush=True)
    peers = {peer: {"median_ms": ms} for peer, ms in times.items()}
    return {
        "group": "invariant",
        "name": f"{name}, batch {batch}",
        "mode": "forward",
        "peers": peers,
        "ratios": {"fusec/invariant": ratio},
    }


if __name__ == "__main__":
    raise SystemExit(main())
