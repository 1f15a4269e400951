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
from dataclasses import dataclass, fields
from pathlib import Path

from filelock import FileLock, Timeout

from fusec.options import Options
from fusec.runtime.cache.memory_file import as_file
from fusec.runtime.cache.store import open_cache
from fusec.runtime.kernels import cpp_kernel
from fusec.runtime.kernels.processor import cpu_features
from fusec.tools.emulator.vocabulary import enumerations, handlers

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
    "register_count", "shared_bytes", "local_bytes", "threads", "thread_registers", "dependent",
    "event_room",
)  # fmt: skip
_FAULT = ("code", "instruction", "other", "warp", "lane", "address", "detail")


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of launches.

    Attributes:
        instructions: of warps; ``floats`` to ``controls`` count them by the pipe that they were
            issued to (``vocabulary.PIPES``).
        global_loaded, global_stored, shared_loaded, shared_stored: bytes that threads and
            asynchronous copies requested; of copies, only the accesses to global memory.
        distinct_loaded, distinct_stored: bytes of global memory that a launch touched, each once
            however often: what memory moves where caches keep the rest.
        barriers: arrivals of warps at barriers of the block.
        copied: bytes of asynchronous copies.
        multiplied: multiply-adds of tensor cores.
        events: those that an array had room for (``launch``).
    """

    instructions: int = 0
    global_loaded: int = 0
    global_stored: int = 0
    distinct_loaded: int = 0
    distinct_stored: int = 0
    shared_loaded: int = 0
    shared_stored: int = 0
    barriers: int = 0
    copied: int = 0
    multiplied: int = 0
    floats: int = 0
    integers: int = 0
    specials: int = 0
    moves: int = 0
    accesses: int = 0
    products: int = 0
    controls: int = 0
    events: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Buffer(ctypes.Structure):
    """Memory that a launch may touch."""

    _fields_ = (("base", ctypes.c_uint64), ("size", ctypes.c_uint64))


class TensorMap(ctypes.Structure):
    """A tensor's descriptor for bulk copies; the innermost axis is first."""

    _fields_ = (
        *(("handle", ctypes.c_uint64), ("base", ctypes.c_uint64), ("rank", ctypes.c_int64)),
        *((name, ctypes.c_int64 * 5) for name in ("dims", "strides", "box")),
        *((name, ctypes.c_int64) for name in ("element", "swizzle", "nan_fill")),
    )


class EventRecord(ctypes.Structure):
    """An instruction that starts or ends asynchronous work, or synchronises with other warps.

    ``mbarrier_wait`` is one when it ends, ``bar`` when it is reached.
    """

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

    _fields_ = (*((name, ctypes.c_int64) for name in _FAULT), ("block", ctypes.c_int64 * 3))


class CountRecord(ctypes.Structure):
    """``Counts`` as the interpreter writes them."""

    _fields_ = tuple((one.name, ctypes.c_int64) for one in fields(Counts))


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
