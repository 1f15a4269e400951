"""The interpreter: C++ that is compiled once a machine, called by ctypes.

Its parts are the files of ``engine/``, in the order of `_PARTS`, as one translation unit; the codes
that it shares with the decoder come from `vocabulary`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fusec.options import Options
from fusec.runtime.cache.memory_file import as_file
from fusec.runtime.cache.store import open_cache
from fusec.runtime.kernels import cpp_kernel
from fusec.runtime.kernels.processor import cpu_features
from fusec.tools.emulator.vocabulary import PIPES, enumerations, handlers

_FOLDER = Path(__file__).parent / "engine"
_PARTS = (
    "program.h", "clocks.h", "blocks.h", "warp.h", "floats.h", "integers.h", "arithmetic.h",
    "memory.h", "threads.h", "barriers.h", "asynchronous.h", "matrix.h",
    "scaled.h", "tensor.h", "control.h", "engine.cpp",
)  # fmt: skip
_LIBRARY = "emulator.so"
PATIENCE_S = 300.0
"""Seconds to wait for another process that builds the engine."""

# Names of fields in the order of ``engine/program.h``.
_POINTERS = ("program", "operands", "tables", "buffers", "maps", "params", "presets", "events")
_SIZES = (
    "instructions", "buffer_count", "map_count", "param_bytes", "preset_count", "file_bytes",
    "register_count", "shared_bytes", "local_bytes", "threads", "thread_registers", "event_room",
)  # fmt: skip
_FAULT = ("code", "instruction", "other", "warp", "lane", "address", "detail")
_COUNTS = (
    "instructions", "global_loaded", "global_stored", "distinct_loaded", "distinct_stored",
    "shared_loaded", "shared_stored", "barriers", "copied", "multiplied", *PIPES, "events",
)  # fmt: skip


class Buffer(ctypes.Structure):
    """Memory that a launch may touch."""

    _fields_ = (("base", ctypes.c_uint64), ("size", ctypes.c_uint64))


class TensorMap(ctypes.Structure):
    """A tensor's descriptor for bulk copies; the innermost axis is first."""

    _fields_ = (
        ("handle", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 5),
        ("box", ctypes.c_int64 * 5),
        ("element", ctypes.c_int64),
        ("swizzle", ctypes.c_int64),
        ("nan_fill", ctypes.c_int64),
    )


class EventRecord(ctypes.Structure):
    """An event of a warp; see ``launch.Event``."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("block", "warp", "instruction"))


class Launch(ctypes.Structure):
    """The arguments of the interpreter."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("grid", ctypes.c_int64 * 3),
        ("seed", ctypes.c_int64),
        ("step_limit", ctypes.c_int64),
    )


class FaultRecord(ctypes.Structure):
    """The first fault of a launch; code 0: none."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _FAULT),
        ("block", ctypes.c_int64 * 3),
    )


class CountRecord(ctypes.Structure):
    """The counters of a launch; see ``launch.Counts``."""

    _fields_ = tuple((name, ctypes.c_int64) for name in _COUNTS)


def engine_source() -> str:
    """Return the translation unit."""
    texts = {name: (_FOLDER / name).read_text(encoding="utf-8") for name in _PARTS}
    words = enumerations() + f"#define FUSEC_HANDLERS {handlers()}\n"
    return "\n".join((texts["program.h"], words, *(texts[name] for name in _PARTS[1:])))


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time build the engine; all of them where files cannot be locked."""
    lock = FileLock(folder / f"fusec-emulator-{os.getuid()}.lock")
    with contextlib.ExitStack() as held:
        with contextlib.suppress(Timeout, OSError):
            held.enter_context(lock.acquire(timeout=PATIENCE_S))
        yield


@functools.cache
def load_engine() -> ctypes.CDLL:
    """Return the interpreter, built at the first use on this machine.

    Raises:
        EnvironmentProblem: if there is no C++ compiler.
    """
    options = Options.from_compile(None, None)
    source = engine_source()
    facts = (source, cpp_kernel.compiler_identity(options.cxx), cpu_features())
    key = f"emulator-{hashlib.sha256(repr(facts).encode()).hexdigest()}"
    cache = open_cache(options)
    with _one_at_a_time(Path(tempfile.gettempdir())):
        blobs = cache.load(key)
        if blobs is None:
            blobs = {_LIBRARY: cpp_kernel.build(source, options)}
            cache.store(key, blobs)
    library = ctypes.CDLL(str(as_file(blobs[_LIBRARY])))
    pointers = [ctypes.POINTER(kind) for kind in (Launch, FaultRecord, CountRecord)]
    library.fusec_emulate.argtypes = pointers
    library.fusec_emulate.restype = None
    return library
