"""How fast GPU kernels are emulated: `python -m bench.emulator [--quick]`.

A training step of blocks of `tests/tools/emulator/blocks.py`, compiled before: warp instructions in
the emulator, its seconds, and their rate, with all checks on. `--quick` leaves GPT-2's own width
out.
"""

from __future__ import annotations

import argparse
import sys
import time
from unittest import mock

import torch

from fusec.tools.emulator import launch
from fusec.tools.emulator.engine import Counts
from fusec.tools.report.emulation import Emulator
from tests.tools.emulator import blocks

CASES = (
    ("GPT-2 block, 64 wide", blocks.gpt2, (2, 24, 64), "library"),
    ("the same, own products", blocks.gpt2, (2, 24, 64), "fused"),
    ("Llama block, own products", blocks.llama, (2, 24, 64), "fused"),
    ("GPT-2 block, 768 wide", blocks.gpt2_small, (1, 128, 768), "library"),
    ("the same, own products", blocks.gpt2_small, (1, 128, 768), "fused"),
)
QUICK = 3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.emulator", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small blocks alone")
    options = parser.parse_args(arguments)
    for name, make, shape, race in CASES[: QUICK if options.quick else None]:
        instructions, seconds = measure(make().bfloat16(), shape, race)
        rate = 60e-6 * instructions / seconds
        print(
            f"{name:28}{instructions:>14,} warp instructions{seconds:8.2f} s{rate:9.1f} M a minute",
            flush=True,
        )
    return 0


def measure(block: torch.nn.Module, shape: tuple[int, ...], race: str) -> tuple[int, float]:
    """Return the warp instructions of a training step, and the seconds that the emulator took."""
    seconds = 0.0
    run = launch.launch

    def timed(*args: object, **given: object) -> Counts:
        nonlocal seconds
        start = time.perf_counter()
        counts = run(*args, **given)
        seconds += time.perf_counter() - start
        return counts

    torch._dynamo.reset()
    emulator = Emulator.of("sm_90", {"race": race})
    compiled = torch.compile(block, backend=emulator.backend, dynamic=False)
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    compiled(x).sum().backward()  # compiles
    before = sum(one.kernel.counts.instructions for one in emulator.kernels)
    with mock.patch.object(launch, "launch", timed):
        compiled(x).sum().backward()
    after = sum(one.kernel.counts.instructions for one in emulator.kernels)
    return after - before, seconds


if __name__ == "__main__":
    sys.exit(main())
