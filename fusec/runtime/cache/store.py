"""The cache of compiled kernels: in memory for this process, on disk for the next ones.

Decides where entries live, when they are trusted, and which are evicted. A key is text that names
everything the blobs depend on (see `fingerprint` and `cpu_features`); the cache does not interpret
blobs.

    cache = open_cache(options)
    blobs = cache.load(key)
    if blobs is None:
        blobs = {"kernels.so": compile_all()}
        cache.store(key, blobs)                     # `blobs` are used from here on, not re-read
    library = ctypes.CDLL(str(as_file(blobs["kernels.so"])))

Guarantees, all of them tested in tests/runtime/cache/test_store.py:

- One entry is one file (`entry.py`), written under a temporary name, synced, then renamed: readers
  see all of it or nothing, whichever process dies when.
- Every load checks lengths and digests; damage is a miss, and the damaged file is removed.
- A fault of the machine (full or read-only disk, no home directory) costs one warning, never a
  compile. A directory that others could write to is not used at all.
- Only files with names of this module's form are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import secrets
import stat
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusec.errors import EnvironmentProblem
from fusec.options import Options
from fusec.runtime.cache.entry import decode, encode, read_head

logger = logging.getLogger("fusec.cache")

MEMORY_BYTES = 256 << 20
"""Size of the layer in memory; a graph's blobs are 20 kB to 2 MB."""

SHARE = 16
"""A process scans all files after storing 1/SHARE of the limit; an eviction frees 1/SHARE of it."""

ABANDONED_S = 3600
"""Age in seconds from which a temporary file counts as left behind by a dead process."""

listeners: list[Callable[[str, Mapping[str, bytes]], None]] = []
"""Called with the key and blobs of each entry that is found or stored."""

_ENTRY_NAME = re.compile(r"[0-9a-f]{64}\.fusec")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_REMEDY = (
    "Compiled kernels stay in memory, and the next process builds them again. Set FUSEC_CACHE_DIR "
    "to a directory that is yours alone, or FUSEC_CACHE=0 to run without the disk."
)


@dataclass(frozen=True, slots=True)
class Stats:
    """Contents of a cache.

    Attributes:
        problem: why the disk is not used, None if it is.
    """

    directory: Path | None
    problem: str | None
    entries: int
    bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry on disk.

    Attributes:
        key: "" if the entry is damaged.
        size: in bytes.
        written, used: seconds since the epoch.
        hits: how often a process has read it.
        about: a description of the entry: its blob ``ABOUT``.
    """

    key: str
    size: int
    written: float
    used: float
    hits: int
    about: bytes


@dataclass(frozen=True, slots=True)
class _Found:
    """One of our files in the directory."""

    name: str
    bytes: int
    last_use: float
    temporary: bool


class Cache:
    """Blobs by key, in memory and in one directory; may be used from several threads.

    Args:
        directory: where entries live; None: the user's cache directory.
        limit_bytes: what the files may occupy together; 0: memory only, the disk is not touched.
    """

    def __init__(self, directory: Path | None, limit_bytes: int) -> None:
        self.directory = _default_directory() if directory is None else _absolute(directory)
        self.limit_bytes = limit_bytes
        self._memory: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._room = 0

    def load(self, key: str) -> dict[str, bytes] | None:
        """Return the blobs that were stored under `key`, verified, or None."""
        with self._lock:
            blobs = self._memory.get(key)
            if blobs is not None:
                self._memory.move_to_end(key)
        if blobs is None:
            blobs = self._load_from_disk(key)
            if blobs is not None:
                self._remember(key, blobs)
        return None if blobs is None else _told(key, dict(blobs))

    def store(self, key: str, blobs: Mapping[str, bytes]) -> None:
        """Keep `blobs` under `key`; if the disk fails, they are kept in memory alone."""
        self._remember(key, _told(key, dict(blobs)))
        if not self.limit_bytes:
            return
        content = encode(key, blobs)
        if len(content) > self.limit_bytes:
            logger.info("an entry of %d bytes is larger than the cache", len(content))
            return
        with self._faults_tolerated(), self._opened(create=True) as directory:
            try:
                _publish(directory, _entry_name(key), content)
            finally:
                self._evict(directory, len(content))

    def _evict(self, directory: int, stored: int) -> None:
        """Evict entries if the bytes stored since the last scan may exceed the limit.

        A scan of 9,000 files takes 40 ms (2026-11), more than storing an entry.
        """
        with self._lock:
            self._room -= stored
            fits = self._room >= 0
        if not fits:
            left = _evict(directory, self.limit_bytes)
            with self._lock:
                # Other processes store, too.
                self._room = min(left, self.limit_bytes // SHARE)

    def forget(self) -> None:
        """Empty the layer in memory; what is on disk stays."""
        with self._lock:
            self._memory.clear()

    def clear(self) -> int:
        """Remove every entry, in memory and on disk, and return how many files that were."""
        self.forget()
        removed = 0
        with self._faults_tolerated(), self._opened(create=False) as directory:
            for found in _files_in(directory):
                removed += _remove(directory, found.name)
        return removed

    def keys(self, prefix: str) -> list[str]:
        """Return the keys with this prefix, in memory and on disk, sorted.

        It reads the head of every file, so it is for tools, not for compiles.
        """
        with self._lock:
            found = set(self._memory)
        found.update(listed.key for listed in self.listing())
        return sorted(key for key in found if key.startswith(prefix))

    def listing(self) -> list[Listed]:
        """Return the entries on disk, the latest used first; it reads the head of every file."""
        found: list[Listed] = []
        if self.limit_bytes:
            with self._faults_tolerated(), self._opened(create=False) as directory:
                for file in _files_in(directory):
                    listed = None if file.temporary else _listed(directory, file.name)
                    found += [] if listed is None else [listed]
        return sorted(found, key=lambda listed: -listed.used)

    def stats(self) -> Stats:
        """Return the cache's size, and why the disk is not used if it is not."""
        problem = None if self.limit_bytes else "the cache on disk is turned off"
        entries: list[_Found] = []
        if problem is None:
            try:
                with self._opened(create=False) as directory:
                    entries = [found for found in _files_in(directory) if not found.temporary]
            except FileNotFoundError:
                pass  # nothing was stored yet
            except (EnvironmentProblem, OSError) as error:
                problem = str(error)
        return Stats(
            self.directory,
            problem,
            len(entries),
            sum(entry.bytes for entry in entries),
            self.limit_bytes,
        )

    def check(self) -> str | None:
        """Try to write an entry to the disk; return why that failed, None if it did not."""
        name = _entry_name("check")
        try:
            with self._opened(create=True) as directory:
                _publish(directory, name, encode("check", {}))
                _remove(directory, name)
        except EnvironmentProblem as problem:
            return str(problem)
        except OSError as fault:
            return f"the cache {self.directory} is unusable: {fault.strerror or fault}. {_REMEDY}"
        return None

    def _remember(self, key: str, blobs: dict[str, bytes]) -> None:
        with self._lock:
            self._memory[key] = blobs
            self._memory.move_to_end(key)
            size = sum(len(blob) for kept in self._memory.values() for blob in kept.values())
            while size > MEMORY_BYTES and len(self._memory) > 1:
                _, dropped = self._memory.popitem(last=False)
                size -= sum(map(len, dropped.values()))

    def _load_from_disk(self, key: str) -> dict[str, bytes] | None:
        if not self.limit_bytes:
            return None
        name = _entry_name(key)
        blobs: dict[str, bytes] | None = None
        with self._faults_tolerated(), self._opened(create=False) as directory:
            content = _read(directory, name)
            if content is not None:
                blobs = decode(key, content)
                if blobs is None:
                    logger.info("cache entry %s is damaged: removed, to be built again", name)
                    _remove(directory, name)
        return blobs

    @contextlib.contextmanager
    def _opened(self, *, create: bool) -> Iterator[int]:
        """Yield a descriptor of the directory, checked: every file is opened relative to it.

        Raises:
            EnvironmentProblem: if others could have put files there.
            OSError: if it cannot be made or opened.
        """
        if self.directory is None:
            raise EnvironmentProblem(f"there is no home directory for a cache. {_REMEDY}")
        if create:
            _make(self.directory)
        if self.directory.is_symlink():
            raise EnvironmentProblem(f"the cache {self.directory} is a symbolic link. {_REMEDY}")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.directory, flags)
        try:
            _refuse_if_unsafe(self.directory, os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _faults_tolerated(self) -> Iterator[None]:
        """Suppress errors of the file system, with one warning for each kind."""
        try:
            yield
        except FileNotFoundError:
            pass  # no directory yet, or somebody cleared it just now: an ordinary miss
        except EnvironmentProblem as problem:
            _warn_once("unsafe", str(problem))
        except OSError as fault:
            kind = "full" if fault.errno in (errno.ENOSPC, errno.EDQUOT) else "unusable"
            reason = fault.strerror or str(fault)
            _warn_once(kind, f"the cache {self.directory} is {kind}: {reason}. {_REMEDY}")


def _told(key: str, blobs: dict[str, bytes]) -> dict[str, bytes]:
    for listen in listeners:
        listen(key, blobs)
    return blobs


def open_cache(options: Options) -> Cache:
    """Return this process's cache for `options`; equal settings share one, memory included."""
    limit_bytes = options.cache_size_mb << 20 if options.cache else 0
    return _shared_cache(options.cache_dir, limit_bytes)


@functools.cache
def _shared_cache(directory: str | None, limit_bytes: int) -> Cache:
    return Cache(None if directory is None else Path(directory), limit_bytes)


@functools.cache
def fingerprint(package: Path = Path(__file__).parents[2]) -> str:
    """Return a digest of what every kernel depends on: fusec's sources, torch, Triton, Python.

    If the environment replaces Triton's ptxas, that file's content is included.
    """
    digest = hashlib.sha256()
    for source in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".h")):
        digest.update(f"{source.relative_to(package).as_posix()}\0".encode())
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    for distribution in ("torch", "triton"):
        digest.update(f"{distribution} {_version(distribution)}\0".encode())
    digest.update(f"{sys.implementation.cache_tag} {platform.python_version()}\0".encode())
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        with contextlib.suppress(OSError):
            if path := os.environ.get(variable):
                digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()


def _version(distribution: str) -> str:
    # The metadata, because importing both packages takes more than a second.
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _default_directory() -> Path | None:
    """Return the user's folder for fusec's cache, as the XDG base directory specification says."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return _absolute((base if base.is_absolute() else Path("~/.cache")) / "fusec")


def _absolute(directory: Path) -> Path | None:
    try:
        return Path(os.path.abspath(directory.expanduser()))
    except RuntimeError:  # a leading "~", and no home directory
        return None


def _make(directory: Path) -> None:
    """Make the directory and its parents, if they are not there.

    Raises:
        EnvironmentProblem: where no directory can be created, as in /proc (ENOENT).
        OSError: for any other fault.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    except FileNotFoundError as fault:
        raise EnvironmentProblem(f"the cache {directory} cannot be made. {_REMEDY}") from fault


def _refuse_if_unsafe(directory: Path, status: os.stat_result) -> None:
    """Raise EnvironmentProblem if anybody but this user could have written into `directory`."""
    if status.st_uid != os.geteuid():
        found = f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        found = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return
    raise EnvironmentProblem(f"the cache {directory} {found}, so it is not used. {_REMEDY}")


# O_NONBLOCK: a FIFO in the place of an entry must not make us wait for its writer.
_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SECOND = 10**9


def _entry_name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}.fusec"


def _read(directory: int, name: str) -> bytes | None:
    """Return the content of the file and record the use, or None if there is no such file."""
    try:
        descriptor = os.open(name, _READING, dir_fd=directory)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        with contextlib.suppress(OSError):  # a read-only file system: then nothing is evicted
            # The nanoseconds of the mtime count the uses: no file is rewritten for that.
            os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns + 1))
        return file.read()


def _listed(directory: int, name: str) -> Listed | None:
    """Return the description of the entry in this file; does not count as a use."""
    try:
        with open(os.open(name, _READING, dir_fd=directory), "rb") as file:
            with contextlib.suppress(OSError):  # another user's file
                fcntl.fcntl(file, fcntl.F_SETFL, os.O_NOATIME)
            status = os.fstat(file.fileno())
            written, hits = divmod(status.st_mtime_ns, _SECOND)
            key, about = read_head(file)
            return Listed(key, status.st_size, written, status.st_atime, hits, about)
    except OSError:  # evicted meanwhile, or not readable
        return None


def _publish(directory: int, name: str, content: bytes) -> None:
    """Write `content` under a temporary name, sync it, and rename it to `name` in one step."""
    temporary = f".{name.removesuffix('.fusec')}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            status = os.fstat(descriptor)
            written = status.st_mtime_ns - status.st_mtime_ns % _SECOND  # no hits yet
            os.utime(descriptor, ns=(status.st_atime_ns, written))
            os.fsync(descriptor)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        _remove(directory, temporary)
        raise


def _remove(directory: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:  # another process was faster, or it is not ours to remove
        return False
    return True


def _files_in(directory: int) -> list[_Found]:
    """Return this module's files in a directory that may hold others."""
    files = []
    with os.scandir(directory) as listing:
        for file in listing:
            temporary = bool(_TEMPORARY_NAME.fullmatch(file.name))
            if not temporary and not _ENTRY_NAME.fullmatch(file.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                status = file.stat(follow_symlinks=False)
                files.append(_Found(file.name, status.st_size, status.st_atime, temporary))
    return files


def _evict(directory: int, limit_bytes: int) -> int:
    """Remove abandoned temporary files, and least recently used entries if not all fit.

    Returns:
        The bytes that are free below the limit.
    """
    files = _files_in(directory)
    for found in files:
        if found.temporary and found.last_use < time.time() - ABANDONED_S:
            _remove(directory, found.name)
    entries = sorted((f for f in files if not f.temporary), key=lambda found: found.last_use)
    total = sum(entry.bytes for entry in entries)
    wanted = limit_bytes if total <= limit_bytes else limit_bytes - limit_bytes // SHARE
    for entry in entries:
        if total <= wanted:
            break
        _remove(directory, entry.name)
        total -= entry.bytes
    return limit_bytes - total


_warned: set[str] = set()


def _warn_once(kind: str, message: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("%s", message)
