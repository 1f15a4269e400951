"""Other programs beside a measurement: a machine that is shared, as containers share theirs.

`beside` starts some; `Others` says how much of the machine was theirs, wanted or not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENDLESS = """
import os
while os.getppid() == {parent}:
    for _ in range(1_000_000):
        pass
"""
"""A program of one thread that computes until the process that started it is gone."""


@contextmanager
def beside(count: int) -> Iterator[list[int]]:
    """Run ``count`` endless programs of one thread, of equal priority; yield their process ids."""
    command = [sys.executable, "-c", ENDLESS.format(parent=os.getpid())]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield [program.pid for program in started]
    finally:
        for program in started:
            program.kill()
            program.wait()


class Others:
    """CPUs that were not this process's since this was made; None where the kernel does not tell.

    A virtual machine's CPU that its host gave to another one counts, too.
    """

    def __init__(self) -> None:
        self.start, self.used, self.own = time.perf_counter(), busy_seconds(), time.process_time()

    def cpus(self) -> float | None:
        """Return CPU-seconds of others a second: 1.0 is a whole CPU."""
        used = busy_seconds()
        if used is None or self.used is None:
            return None
        own = time.process_time() - self.own
        taken = used - self.used - own
        return round(max(0.0, taken) / (time.perf_counter() - self.start), 3)


def busy_seconds() -> float | None:
    """Return what all CPUs have worked since the machine started, and what its host kept back."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _waits, hard, soft, stolen = map(int, fields)
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")
