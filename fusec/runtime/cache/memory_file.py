"""Expose bytes as a file with a path, so that exactly the verified bytes are loaded.

dlopen takes a path. A file in the cache directory could be replaced between the check of its digest
and its loading, and the directory may be mounted noexec. So the verified bytes are written to an
anonymous file in memory, sealed, and opened as /proc/self/fd/N. Where such files are missing (not
Linux) or forbidden, a private directory of this process, mode 0700, takes their place.

The descriptor has to stay open for the life of the process: glibc recognises a loaded library by
its path, so that a second library under a reused N would silently be the first.
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

_files: dict[str, Path] = {}
_files_lock = threading.Lock()


def as_file(content: bytes) -> Path:
    """Return a path that reads as `content` for the life of this process; equal bytes share one.

    Raises:
        OSError: if there is neither memory nor a directory for temporary files.
    """
    digest = hashlib.sha256(content).hexdigest()
    with _files_lock:
        path = _files.get(digest)
        if path is None:
            path = _files[digest] = _in_memory(content) or _in_private_directory(digest, content)
        return path


def _in_memory(content: bytes) -> Path | None:
    """Return the path of a sealed anonymous file, or None where the system supports none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("fusec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
