"""Expose bytes as a file with a path, so that exactly the verified bytes are loaded.

dlopen takes a path. A file in the cache directory could be replaced between the check of its digest
and its loading, and the directory may be mounted noexec. So the verified bytes are written to an
anonymous file in memory, sealed, and opened as /proc/self/fd/N. Where such files are missing (not
Linux) or forbidden, a private directory of this process, mode 0700, takes their place.

glibc recognises a loaded library by its path: a second library under a reused N would silently be
the first. So the descriptor stays open for the life of the process, and no number is given out
twice: whoever makes a daemon closes all descriptors that it knows nothing of.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import os
import resource
import shutil
import tempfile
import threading
from pathlib import Path

_files: dict[str, tuple[Path, tuple[int, int] | None]] = {}
"""Digest -> the path, and which file it has to be."""
_files_lock = threading.Lock()
_least = 0
"""The descriptor from which on none was given out; a forked child goes on from there."""


def as_file(content: bytes) -> Path:
    """Return a path that reads as `content` for the life of this process; equal bytes share one.

    Raises:
        OSError: if there is neither memory nor a directory for temporary files.
    """
    digest = hashlib.sha256(content).hexdigest()
    with _files_lock:
        known = _files.get(digest)
        if known is not None and _identity(known[0]) == known[1]:
            return known[0]
        path = _in_memory(content) or _in_private_directory(digest, content)
        _files[digest] = path, _identity(path)
        return path


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file a path leads to; None if it leads nowhere."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _own_number(descriptor: int) -> int:
    """Return the descriptor under a number that this process has not given out before."""
    global _least
    if descriptor < _least:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _least)
        os.close(descriptor)
        descriptor = moved
    _least = descriptor + 1
    return descriptor


def _in_memory(content: bytes) -> Path | None:
    """Return the path of a sealed anonymous file, or None where the system supports none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = _own_number(os.memfd_create("fusec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError:  # out of descriptors, or vm.memfd_noexec=2
        return None
    path = Path(f"/proc/self/fd/{descriptor}")
    try:
        # Descriptors are scarce (1024 by default), and most of them are the application's.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if (limit != resource.RLIM_INFINITY and descriptor > limit // 2) or not path.exists():
            raise OSError("few descriptors are left, or there is no /proc")
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        return None
    return path


def _in_private_directory(digest: str, content: bytes) -> Path:
    path = _private_directory() / f"{digest}.so"
    path.write_bytes(content)
    return path


@functools.cache
def _private_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="fusec-")  # mkdtemp makes it 0700
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child inherits this hook, but not the directory
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return Path(directory)
