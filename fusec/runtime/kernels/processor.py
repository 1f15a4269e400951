"""The features of this machine's processor: kernels are compiled for its vector extensions."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

from fusec.processors import PROCESSORS

# Extensions of the instruction set that a compiler may use for arithmetic, by the prefix of their
# names in /proc/cpuinfo; the rest of that line is about virtual machines and power.
_X86_PREFIXES = (
    "sse", "ssse", "avx", "fma", "f16c", "bmi", "abm", "popcnt", "movbe", "amx", "gfni",
)  # fmt: skip
_ARM_PREFIXES = ("asimd", "fp", "sve", "sme", "bf16", "i8mm", "fcma", "atomics")


@functools.cache
def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the architecture and its vector extensions: "x86_64 avx avx2 fma ..."."""
    architecture = platform.machine()
    try:
        text = cpuinfo.read_text()
    except OSError:
        return f"{architecture} {platform.processor()}".strip()
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    prefixes = _ARM_PREFIXES if architecture in ("aarch64", "arm64") else _X86_PREFIXES
    flags = {flag for flag in listed[1].split() if flag.startswith(prefixes)} if listed else set()
    return " ".join((architecture, *sorted(flags)))


def cpu_model() -> str:
    """Return the processor's model name: "AMD EPYC 9R14"; "" where the system has none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        found = re.search(r"^model name\s*:(.*)$", text, re.MULTILINE)
    except OSError:
        return platform.processor()
    return found[1].strip() if found else ""


def needed_features(target: str) -> str:
    """Return the processor features that kernels of a CPU target may use."""
    return PROCESSORS[target].features if target in PROCESSORS else cpu_features()


def missing_features(needed: str) -> str:
    """Return the needed features that this machine's processor lacks, sorted."""
    return " ".join(sorted(set(needed.split()) - set(cpu_features().split())))
