"""What sets of compiler flags cost and give: `python -m bench.cpp_flags [--only NAME]`.

The sources that fusec prints for a spread of kernels are built under each set of flags. Printed
are, for each set beside the first one:

* the CPU seconds of the compiler, of all units together;
* how much longer each kernel takes: CPU time of one thread, sets in turn in many short rounds, the
  median over rounds of the ratio to the neighbours in time, so that a slow moment hits both;
* which kernels give other bits than those of the first set, marked `!`.

Kernels run on the inputs that they had in their graph, in the same memory whoever built them, at
sizes that fit a core's own cache: what waits for memory looks the same under any flags.
"""

from __future__ import annotations

import argparse
import copy
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from bench import workloads
from bench.timing import quiet
from bench.workload import Workload, compiled, cotangents_of, step_of
from fusec.options import Options
from fusec.runtime.kernels import cpp_kernel

WORKING = ("-O1", "-finline-small-functions", "-fschedule-insns2", "-fgcse", "-ftree-pre",
           "-fexpensive-optimizations", "-fstrict-aliasing", "-fcaller-saves")  # fmt: skip
SETS: Mapping[str, tuple[str, ...]] = {
    "today": cpp_kernel.OPTIMISE,
    "O2": ("-O2",),
    "O1+": WORKING,
    "O1": ("-O1",),
}
"""What is compared: flags of optimisation, by name. The first is what the others stand beside."""


@dataclass
class Unit:
    """A translation unit, and the calls of its kernels: names with the arguments they had."""

    label: str
    source: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass
class Kernel:
    """One kernel under every set of flags: calls of it, on the same arguments."""

    label: str
    steps: dict[str, Callable[[], None]]
    other_bits: list[str]
    ratios: dict[str, list[float]] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    sets = dict(SETS)
    for text in options.set:
        name, _, flags = text.partition("=")
        sets[name] = tuple(flags.split())
    units = []
    for workload in workloads.cpu():
        if options.only.lower() in f"{workload.group} {workload.label}".lower():
            print(f"{workload.label} ...", file=sys.stderr, flush=True)
            units += recorded(workload, options.shrink)
    if not units:
        print(f"no workload has {options.only!r} in its name", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        seconds, kernels = built(units, sets, Path(folder))
        deadline = time.perf_counter() + options.seconds
        with quiet():
            while not kernels[-1].ratios or time.perf_counter() < deadline:
                for kernel in kernels:
                    sample(kernel)
    print(report(sets, seconds, kernels))
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench.cpp_flags", description=__doc__)
    found.add_argument("--only", default="", help="kernels of workloads with this in their name")
    found.add_argument("--set", action="append", default=[], help="one more: NAME='-O1 -f...'")
    found.add_argument("--shrink", type=int, default=8, help="divides sizes; default %(default)s")
    found.add_argument("--seconds", type=float, default=60.0, help="of timing, in all")
    return found


def recorded(workload: Workload, shrink: int) -> list[Unit]:
    """The units that fusec builds for one workload, with the first call of each kernel."""
    torch._dynamo.reset()
    case = workload.case(shrink=shrink)
    cotangents = cotangents_of(case) if workload.train else None
    with recording(workload.label) as units:
        step_of(case, compiled(case.call, "fusec", {"cache": False, "threads": 1}), cotangents)()
    return units


@contextmanager
def recording(label: str) -> Iterator[list[Unit]]:
    """Collect what is built and called within the block."""
    units: list[Unit] = []
    build, load = cpp_kernel.build, cpp_kernel.load

    def watched_build(source: str, options: Options, *processor: tuple[str, ...]) -> bytes:
        units.append(Unit(f"{label} {len(units)}", source))
        return build(source, options, *processor)

    def watched_load(library: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
        unit = units[-1]
        unit.rows = rows
        loaded = load(library, rows)
        return {name: watched(unit, name, kernel) for name, kernel in loaded.items()}

    with (
        mock.patch.object(cpp_kernel, "build", watched_build),
        mock.patch.object(cpp_kernel, "load", watched_load),
    ):
        yield units


def watched(unit: Unit, name: str, kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel that keeps a copy of the arguments of its first call."""

    def call(*args: Any) -> None:
        if name not in unit.calls:
            unit.calls[name] = copied(args)
        kernel(*args)

    return call


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose tensors overlap each other as before, and nothing else."""
    plain = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
    return copy.deepcopy(plain)


def built(
    units: list[Unit], sets: Mapping[str, tuple[str, ...]], folder: Path
) -> tuple[dict[str, float], list[Kernel]]:
    """CPU seconds of the compiler by set, and the kernels of all units."""
    seconds = dict.fromkeys(sets, 0.0)
    kernels = []
    for number, unit in enumerate(units):
        libraries = {}
        for name, flags in sets.items():
            before = children_seconds()
            with mock.patch.object(cpp_kernel, "OPTIMISE", flags):
                made = cpp_kernel.build(unit.source, Options())
            seconds[name] += children_seconds() - before
            path = folder / f"{number}-{name}.so"
            path.write_bytes(made)
            libraries[name] = cpp_kernel.load(path, unit.rows)
        for kernel, args in unit.calls.items():
            kernels.append(prepared(f"{unit.label} {kernel}", kernel, args, libraries))
    return seconds, kernels


def children_seconds() -> float:
    """User and system seconds of all programs that were started and ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def prepared(
    label: str, name: str, args: tuple[Any, ...], libraries: Mapping[str, Mapping[str, Any]]
) -> Kernel:
    """Call a kernel of every library once, on equal arguments, and compare what they wrote."""
    shared = copied(args)
    written = {}
    for chosen, library in libraries.items():
        own = copied(args)
        library[name](*own)
        written[chosen] = [bytes_of(t) for t in pytree.tree_leaves(own)]
    steps = {
        chosen: lambda call=library[name]: call(*shared) for chosen, library in libraries.items()
    }
    base = next(iter(libraries))
    return Kernel(label, steps, [s for s in written if written[s] != written[base]])


def bytes_of(value: Any) -> bytes:
    if not isinstance(value, torch.Tensor):
        return b""
    return bytes(value.untyped_storage())


def sample(kernel: Kernel, at_least: float = 0.002) -> None:
    """One round: every set once, and the first one around them."""
    base, *others = kernel.steps
    cpu_of(kernel.steps[base], 1)  # its data comes into the cache
    count = max(1, math.ceil(at_least / max(cpu_of(kernel.steps[base], 1), 1e-7)))
    before = cpu_of(kernel.steps[base], count)
    for name in others:
        own = cpu_of(kernel.steps[name], count)
        after = cpu_of(kernel.steps[base], count)
        kernel.ratios.setdefault(name, []).append(2 * own / (before + after))
        before = after


def cpu_of(step: Callable[[], None], count: int) -> float:
    start = time.thread_time()
    for _ in range(count):
        step()
    return time.thread_time() - start


def report(
    sets: Mapping[str, tuple[str, ...]], seconds: Mapping[str, float], kernels: list[Kernel]
) -> str:
    base, *others = sets
    lines = [f"{'kernel':72}" + "".join(f"{name:>12}" for name in others)]
    for kernel in kernels:
        row = f"{kernel.label:72}"
        for name in others:
            found = statistics.median(kernel.ratios[name])
            row += f"{found:11.3f}{'!' if name in kernel.other_bits else ' '}"
        lines.append(row)
    lines.append(f"{'set':24}{'CPU s':>8}{'geomean':>9}{'worst':>8}{'other bits':>12}")
    lines.append(f"{base:24}{seconds[base]:8.2f}{1:9.3f}{1:8.3f}{0:12}  {' '.join(sets[base])}")
    for name in others:
        found = [statistics.median(k.ratios[name]) for k in kernels]
        mean = math.exp(statistics.fmean(map(math.log, found)))
        other = sum(name in k.other_bits for k in kernels)
        lines.append(
            f"{name:24}{seconds[name]:8.2f}{mean:9.3f}{max(found):8.3f}{other:12}"
            f"  {' '.join(sets[name])}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
