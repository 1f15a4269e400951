"""Build and load C++ kernels: one shared library a graph, called by ctypes."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fusec.errors import BuildError, EnvironmentProblem, IndexOutOfRange, NotWritable, warn_user
from fusec.options import Options
from fusec.processors import Bf16
from fusec.runtime.kernels import processor, table

logger = logging.getLogger("fusec.build")

NATIVE = "-march=native"
FLAGS = (
    "-std=c++17", NATIVE, "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions",
    "-ffp-contract=fast", "-fwrapv", "-Wno-psabi", "-fopenmp", "-shared", "-fPIC",
    "-Wl,--as-needed", "-fno-threadsafe-statics",
)  # fmt: skip
"""Semantics and architecture of kernels. They throw nothing: g++ is a sixth quicker for knowing.
They need libgomp alone, so libstdc++ is not loaded with them."""
OPTIMISE = ("-O2", "-fno-tree-vectorize")
"""Optimisation flags. Kernels are vector code already: the compiler's vectoriser takes up to half
of g++'s time and finds nothing."""

FUSE_ALL = ("--param=avoid-fma-max-bits=0",)
"""Under ``batch_invariant``: g++ fuses all multiply-adds alike. Tuned for AMD's processors it does
not where a loop has a single sum, as the last rows of a product, but fuses those of other rows."""


NO_COMPILER = "none"
DIVIDED_BY_ZERO = 2
"""The status of a kernel that met an integer divisor of zero; 1 is an index out of range."""
NO_PROBABILITY = 3
"""The status of a kernel that met a probability outside of [0, 1]."""
_CODES = 4
"""Codes of one kernel; where a call runs several, a status has its part, too (``error``)."""


@functools.cache
def find_compiler(preferred: str | None) -> str | None:
    """Return the C++ compiler's path: the option, then $CXX's value in it, then g++ or clang++."""
    if preferred and shutil.which(preferred) is None:
        warn_user(
            f"fusec: the C++ compiler {preferred!r} does not exist; looking for another. "
            "It was named by the option cxx, FUSEC_CXX or CXX: one path, without arguments."
        )
    for name in (preferred, "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


@functools.cache
def compiler_identity(preferred: str | None) -> str:
    """Return text that identifies the compiler without running it: path, size, mtime."""
    path = find_compiler(preferred)
    if path is None:
        return NO_COMPILER
    status = os.stat(os.path.realpath(path))
    flags = " ".join((*FLAGS, *OPTIMISE))
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns} {flags}"


@functools.cache
def vector_width() -> int:
    """Return the f32 lanes of this machine's vector registers: 16, 8 or 4."""
    flags = set(processor.cpu_features().split())
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return 16
    return 8 if {"avx2", "fma"} <= flags else 4


def bf16_products() -> Bf16:
    """Return how kernels multiply bf16 on this machine's CPU, as ``codegen/cpp/products.h`` does.

    Only AMD's processors, which alone have SSE4a, multiply pairs at twice the rate of f32.
    """
    flags = set(processor.cpu_features().split())
    if vector_width() == 16 and "amx_bf16" in flags:
        return "tiles"
    return "pairs" if vector_width() == 16 and {"avx512_bf16", "sse4a"} <= flags else "widened"


def build(
    source: str, options: Options, processor: tuple[str, ...] = (NATIVE,), more: Sequence[str] = ()
) -> bytes:
    """Compile a translation unit to a shared library and return its bytes.

    Args:
        processor: the flags that select the processor.
        more: further translation units of the library, compiled at the same time.
    Raises:
        EnvironmentProblem: if there is no compiler, it fails on any source, or a disk is full.
        BuildError: if the compiler fails on this source.
    """
    compiler = find_compiler(options.cxx)
    if compiler is None:
        raise EnvironmentProblem("no C++ compiler found; install g++ or clang++, or set FUSEC_CXX")
    flags = (*(flag for flag in FLAGS if flag != NATIVE), *OPTIMISE, *processor)
    flags += FUSE_ALL * options.batch_invariant
    try:
        return _compile_despite_defects([compiler, *flags], source, more)
    except OSError as fault:
        reason = fault.strerror or str(fault)
        if fault.filename == compiler:
            raise EnvironmentProblem(f"the C++ compiler {compiler}: {reason}") from fault
        raise NotWritable(_no_room(reason)) from fault
    except BuildError as failed:
        if _FULL in failed.output:
            raise NotWritable(_no_room(_FULL)) from failed
        if not _is_sound(compiler):
            last = (failed.output.strip().splitlines() or [f"exit {failed.returncode}"])[-1]
            raise EnvironmentProblem(
                f"the C++ compiler {compiler} fails on an empty file, too: {last}; "
                "name another with FUSEC_CXX (fusec doctor checks it)"
            ) from failed
        raise


_FULL = "No space left on device"


def _no_room(reason: str) -> str:
    folder = tempfile.tempdir or os.environ.get("TMPDIR", "the folder for temporary files")
    return f"kernels cannot be built in {folder}: {reason}; TMPDIR names another folder"


@functools.cache
def _is_sound(compiler: str) -> bool:
    """Return True for a compiler that can build an empty library."""
    try:
        _compile([compiler, "-shared", "-fPIC"], "", ())
    except (BuildError, OSError):
        return False
    return True


def _compile_despite_defects(command: list[str], source: str, more: Sequence[str]) -> bytes:
    """Compile a library; where the compiler itself breaks down, with fewer optimisations.

    g++ 12.2 does so in a loop that finds maxima of each element and those before (2026-11).
    """
    try:
        return _compile(command, source, more)
    except BuildError as failed:
        if _BREAKDOWN not in failed.output:
            raise
        logger.info("%s: %s; compiling with -O1", command[0], _BREAKDOWN)
        return _compile([*command, "-O1"], source, more)


_BREAKDOWN = "internal compiler error"


def _compile(command: list[str], source: str, more: Sequence[str]) -> bytes:
    """Compile translation units to a library; ``command`` is the compiler with its flags."""
    with tempfile.TemporaryDirectory(prefix="fusec-") as folder:
        library = Path(folder) / "kernels.so"
        units = [Path(folder) / f"kernels{k}.cpp" for k in range(1 + len(more))]
        for unit, text in zip(units, (source, *more), strict=True):
            unit.write_text(text, encoding="utf-8")
            logger.debug("building %d bytes of C++", len(text))
        if more:
            _run([[*command, "-c", str(unit), "-o", f"{unit}.o"] for unit in units])
        inputs = [f"{unit}.o" if more else str(unit) for unit in units]
        command = [*command, *inputs, "-o", str(library), "-lm"]
        said = _run([command])
        made = library.read_bytes() if library.exists() else b""
        if not made.startswith(b"\x7fELF"):
            raise BuildError(command, f"{said}\n{command[0]} wrote no shared library", 0)
        return made


def _run(commands: Sequence[Sequence[str]]) -> str:
    """Run programs at the same time and return what they print; once more alone, if one is killed.

    Raises:
        BuildError: if one fails.
        EnvironmentProblem: if one is killed twice.
    """
    said = []
    for command, (status, text) in zip(commands, _together(commands), strict=True):
        if status < 0:  # by the kernel, say, as memory was short
            ((status, text),) = _together([command])
        if status < 0:
            reason = signal.strsignal(-status) or f"signal {-status}"
            raise EnvironmentProblem(
                f"the C++ compiler {command[0]} was ended from outside: {reason}"
            )
        if status:
            raise BuildError(command, text, status)
        said.append(text)
    return "".join(said)


def _together(commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """Return the exit statuses of programs, and what they print.

    They have a session of their own: a terminal's interrupt is the process's to handle.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
            )
        said = [process.communicate()[0] for process in running]
    finally:
        for process in running:  # none is left behind, whatever was raised
            process.kill()
    return [(p.returncode, text) for p, text in zip(running, said, strict=True)]


class CppKernel:
    """One function of a loaded library: called with tensors, then sizes.

    Args:
        parts: function name and user's line of each kernel that it runs; an error's status tells
            which of them failed.
    Raises:
        IndexOutOfRange: when an index read from memory was out of range.
        RuntimeError: when an integer was divided by zero (eager's message), or a probability was
            outside of [0, 1].
    """

    __slots__ = ("_call", "_parts", "name")

    def __init__(self, library: ctypes.CDLL, name: str, parts: Sequence[tuple[str, str]]) -> None:
        self.name = name
        self._parts = parts
        self._call: Callable[..., Any] = getattr(library, name)

    def declare(self, buffers: int, sizes: int) -> None:
        """Set the argument types: pointers, 64-bit sizes, the status word."""
        pointer, size = ctypes.c_void_p, ctypes.c_longlong
        self._call.argtypes = [*[pointer] * buffers, *[size] * sizes, pointer]  # type: ignore[attr-defined]
        self._call.restype = None  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> None:
        status = ctypes.c_int(0)
        given = [a if type(a) is int else a.data_ptr() for a in args]
        self._call(*given, ctypes.byref(status))
        while status.value:
            if status.value % _CODES:
                raise self.error(status.value)
            self._call(*given, ctypes.byref(status))  # goes on with a loop that is unfinished

    def error(self, status: int) -> Exception:
        """Return the exception for a kernel's status, by the codes of ``codegen.cpp``."""
        part, code = divmod(status, _CODES)
        if code == DIVIDED_BY_ZERO:
            return RuntimeError("ZeroDivisionError")
        name, where = self._parts[part]
        if code == NO_PROBABILITY:
            return RuntimeError(f"all elements should be between 0 and 1, in {name} ({where})")
        return IndexOutOfRange(f"index out of range in {name} ({where})")


class CppTableKernel:
    """A function that runs for each row of a table: called with the rows' tensors and sizes.

    Raises:
        As ``CppKernel`` does.
    """

    __slots__ = ("_kernel", "blocks")

    def __init__(self, kernel: CppKernel, blocks: str) -> None:
        self._kernel = kernel
        self.blocks = blocks
        kernel.declare(3, 2)  # addresses, sizes and places; their count, and the work

    def __call__(self, rows: table.Rows, sizes: table.RowSizes) -> None:
        found = table.find_places(sizes, self.blocks)
        addresses = table.addresses(rows)
        status = ctypes.c_int(0)
        self._kernel._call(
            (ctypes.c_void_p * len(addresses))(*addresses),
            found.sizes.data_ptr(),
            found.places.data_ptr(),
            found.count,
            found.work,
            ctypes.byref(status),
        )
        if status.value:
            raise self._kernel.error(status.value)


def load(library: Path, kernels: list[dict[str, Any]]) -> dict[str, CppKernel | CppTableKernel]:
    """Return the kernels of a shared library by name.

    Args:
        kernels: rows with ``name``, the ``function``'s name, the numbers of ``buffers`` and
            ``sizes``, the ``parts`` that run, and ``blocks``: of each row of a table, for a kernel
            that runs for rows of a table, else None.
    """
    handle = ctypes.CDLL(str(library))
    loaded: dict[str, CppKernel | CppTableKernel] = {}
    for row in kernels:
        kernel = CppKernel(handle, row["function"], row["parts"])
        if row["blocks"] is None:
            kernel.declare(row["buffers"], row["sizes"])
            loaded[row["name"]] = kernel
        else:
            loaded[row["name"]] = CppTableKernel(kernel, row["blocks"])
    return loaded
