"""One fresh process of `bench.compile_time`: compile one training step and say what it cost.

Importing torch and building the model is not measured, nor is a second step's running time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.workload import backend_of
from bench.workloads.blocks import Gpt, MlpBlock
from bench.workloads.vision import DenseNet

STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"}


def main() -> int:
    options = parser().parse_args()
    if options.fusec:
        sys.path.insert(0, str(options.fusec))
    started = count_subprocesses()
    step = training_step(options.case, options.peer, quick=options.quick)
    cpu, others, wall, programs = cpu_seconds(), others_seconds(), time.perf_counter(), started[0]
    step()
    found = {
        "cpu_s": round(cpu_seconds() - cpu, 3),
        "programs_cpu_s": round(others_seconds() - others, 3),
        "wall_s": round(time.perf_counter() - wall, 3),
        "subprocesses": started[0] - programs,
    }
    if options.peer == "fusec":
        found["own_cpu_s"] = own_seconds()
    step()  # the compiled code runs a second time, too
    options.result.write_text(json.dumps(found))
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench.compile_child", description=__doc__)
    found.add_argument("case")
    found.add_argument("peer")
    found.add_argument("result", type=Path)
    found.add_argument("--fusec", type=Path, help="the checkout whose fusec compiles")
    found.add_argument("--quick", action="store_true")
    return found


def training_step(case: str, peer: str, *, quick: bool) -> Callable[[], None]:
    """A step whose first call compiles forward and backward."""
    if case.startswith("architecture "):
        return architecture_step(case.removeprefix("architecture "), peer)
    torch.manual_seed(0)
    width = 64 if quick else 256
    if case.startswith("mlp"):
        model, x = MlpBlock(width), torch.randn(4, 64, width)
    elif case.startswith("densenet"):
        depths = (2, 2) if quick else (6, 12, 24, 16)
        model, x = DenseNet(depths), torch.randn(4, 3, 64, 64)
    else:
        layers = 1 if quick else 4
        model, x = Gpt(layers, width, width // 64, 1000, 64), torch.randint(0, 1000, (2, 64))
    compiled = model if peer == "eager" else torch.compile(model, backend=backend_of(peer))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    return step


def architecture_step(name: str, peer: str) -> Callable[[], None]:
    """The step of one of the tests' architectures; some of their parameters have no gradient."""
    from tests.models.architectures import ARCHITECTURES, SIZES

    os.environ["FUSEC_RACE_BUDGET_S"] = "0"
    row = ARCHITECTURES[name]
    model, arguments = row.build(), row.arguments(SIZES[0])
    compiled = model if peer == "eager" else torch.compile(model, backend=backend_of(peer))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        results = compiled(*arguments).values()
        sum(result.sum() for result in results if result.requires_grad).backward()
        assert any(p.grad is not None for p in model.parameters())

    return step


def count_subprocesses() -> list[int]:
    """A list whose one entry counts the programs started from now on."""
    count = [0]

    def hook(event: str, _: tuple[object, ...]) -> None:
        if event in STARTS:
            count[0] += 1

    sys.addaudithook(hook)
    return count


def cpu_seconds() -> float:
    """CPU seconds of this process, of children that ended, and of descendants that live.

    `resource.getrusage` alone misses a compiler's pool of workers, which outlives the compile.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + others_seconds()


def others_seconds() -> float:
    """The part of `cpu_seconds` of other programs: for fusec, the C++ compiler."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(seconds for _, seconds in descendants())
    return ended.ru_utime + ended.ru_stime + living


def descendants() -> list[tuple[int, float]]:
    """Living descendants with their CPU seconds and their ended children's; empty without /proc."""
    parents: dict[int, tuple[int, float]] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        parents[int(entry.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / tick)
    found, family = [], {os.getpid()}
    grown = True
    while grown:
        new = {pid for pid, (parent, _) in parents.items() if parent in family} - family
        found += [(pid, parents[pid][1]) for pid in new]
        family |= new
        grown = bool(new)
    return found


def own_seconds() -> float | None:
    """fusec's own CPU seconds of all compiles so far, where it tells."""
    import fusec  # only for the peer of that name

    tell = getattr(fusec, "last_compile_seconds", None)
    if tell is not None:
        return round(float(tell()), 4)
    try:
        from fusec.driver.compiler import RECENT
    except ImportError:
        return None
    return round(sum(sum(trace.wall_seconds.values()) for trace in RECENT), 4)


if __name__ == "__main__":
    sys.exit(main())
