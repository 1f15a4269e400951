"""Check this machine: versions, C++ compiler, Triton's tools, GPU, vector width, cache, variables.

Exit code 4 if something is missing that fusec needs to compile for this machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fusec import __version__
from fusec.errors import EnvironmentProblem, FusecError
from fusec.options import Options, environment_variables
from fusec.processors import DEVICES
from fusec.runtime.cache.store import open_cache
from fusec.runtime.kernels.cpp_kernel import build, find_compiler, vector_width
from fusec.tools.cli.output import show

HELP = "check versions, compilers, GPU and cache on this machine"
_PACKAGES = ("torch", "triton", "networkx", "numpy", "rich", "transformers")
_PROBE = """
#include <omp.h>
extern "C" int probe(int n) {
  int total = 0;
  #pragma omp parallel for reduction(+ : total)
  for (int i = 0; i < n; ++i) total += i;
  return total;
}
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``problem`` says what to do, or is empty."""

    what: str
    seen: str
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 4 if one is a problem."""
    options = Options.from_compile(None, None)
    findings = [finding for check in CHECKS for finding in check(options)]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark = "PROBLEM  " if finding.problem else ""
        show(f"{finding.what:<{width}}  {mark}{finding.seen}")
        if finding.problem:
            show(f"{'':<{width}}  {finding.problem}")
    failed = sum(bool(finding.problem) for finding in findings)
    show(
        f"\n{failed} problem{'s' * (failed != 1)}" if failed else "\neverything fusec needs is here"
    )
    return EnvironmentProblem.exit_code if failed else 0


def _versions(options: Options) -> Iterator[Finding]:
    yield Finding("fusec", __version__)
    yield Finding("python", platform.python_version())
    for package in _PACKAGES:
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "not installed")


def _processor(options: Options) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    width = vector_width()
    seen = f"{platform.machine()}, {cores} cores, vectors of {width} f32 lanes ({width * 32} bits)"
    yield Finding("processor", seen)


def _compiler(options: Options) -> Iterator[Finding]:
    what = "C++ compiler"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report names a missing compiler itself
        compiler = find_compiler(options.cxx)
    if compiler is None:
        advice = "Install g++ or clang++, or name one with FUSEC_CXX: CPU graphs run eagerly."
        yield Finding(what, "none", advice)
        return
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    seen = f"{compiler}: {(done.stdout.splitlines() or ['?'])[0]}"
    try:
        build(_PROBE, options)
    except FusecError as error:
        yield Finding(what, seen, f"It cannot build an OpenMP library: {error}")
        return
    problem = ""
    if options.cxx and shutil.which(options.cxx) is None:
        problem = f"FUSEC_CXX or CXX names {options.cxx!r}, which does not exist: mend or unset it."
    yield Finding(what, f"{seen}; builds an OpenMP library", problem)


def _triton(options: Options) -> Iterator[Finding]:
    try:
        # Local: Triton is absent on platforms where fusec compiles for the CPU alone.
        from fusec.runtime.kernels.triton_interior import assembler, disassembler

        tools = [assembler("sm_90"), disassembler()]
    except Exception as error:
        yield Finding("triton tools", f"none ({error}); dump and explain stop at the source")
        return
    missing = ", ".join(tool for tool in tools if not os.access(tool, os.X_OK))
    advice = "Reinstall triton: they are part of it." if missing else ""
    seen = missing or f"ptxas, nvdisasm; compiles for {', '.join(DEVICES)}"
    yield Finding("triton tools", seen, advice)


def _gpu(options: Options) -> Iterator[Finding]:
    # Local: `fusec --help` shall not wait for this import.
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "none; every stage of every target can be dumped without one")
        return
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        memory = facts.total_memory / 2**30
        seen = f"{facts.name}, sm_{facts.major}{facts.minor}, {memory:.0f} GiB"
        yield Finding(f"GPU {number}", seen)


def _cache(options: Options) -> Iterator[Finding]:
    if not options.cache:
        yield Finding("cache", "turned off by FUSEC_CACHE")
        return
    cache = open_cache(options)
    problem = cache.check() if options.cache_size_mb else None
    stats = cache.stats()
    seen = f"{stats.directory}: {stats.entries} entries, {stats.bytes / 2**20:.1f} MiB"
    written = "a file cannot be written" if problem or stats.problem else "a file can be written"
    yield Finding("cache", f"{seen}; {written}", problem or stats.problem or "")
    if stats.directory is not None:
        there = next(filter(Path.exists, (stats.directory, *stats.directory.absolute().parents)))
        free = shutil.disk_usage(there).free
        needed = max(stats.limit_bytes - stats.bytes, 0)
        advice = f"The cache may take {needed / 2**20:.0f} MiB more: FUSEC_CACHE_SIZE_MB bounds it."
        yield Finding("disk", f"{free / 2**30:.1f} GiB free", advice if free < _LITTLE else "")


_LITTLE = 64 << 20
"""Free bytes below which a large model's kernels do not fit."""


def _variables(options: Options) -> Iterator[Finding]:
    """Return the environment variables of fusec's that are set."""
    names = [variable.name for variable in environment_variables()]
    return (Finding(name, os.environ[name]) for name in (*names, "CXX") if os.environ.get(name))


CHECKS: tuple[Callable[[Options], Iterator[Finding]], ...] = (
    _versions, _processor, _compiler, _triton, _gpu, _cache, _variables,
)  # fmt: skip
