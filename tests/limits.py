"""What a process may use of its machine, made little: limits that the kernel enforces."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from tests import quick_build


@contextmanager
def files_up_to(length: int) -> Iterator[None]:
    """Let no file grow beyond some bytes, as on a full disk: a longer write is an OSError."""
    quick_build.prepare()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def descriptors_up_to(count: int) -> Iterator[None]:
    """Let this process open a few more files: this many descriptors are left."""
    quick_build.prepare()
    free = [os.dup(0) for _ in range(count + 1)]  # numbers in between may be taken
    for descriptor in free:
        os.close(descriptor)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
