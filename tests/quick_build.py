"""Quick compiles for tests: torch writes no logs, and g++ builds kernels for their values.

A process of a test's own enters what the run of the tests did, by `quick_compiles_as_told`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from filelock import FileLock

QUICK = "-Og"
LARGE = 100_000
"""Characters of a translation unit that is worth a look for an earlier build."""
SHARED = "TESTS_SHARED"
"""The variable that names a folder of all workers of a run: of what they build alike."""
TOLD = "TESTS_QUICK_BUILD"
"""The variable that names it where compiles are quick, to the processes that tests start."""


@contextmanager
def quick_compiles_as_told() -> Iterator[None]:
    """Compile as the tests that started this process do."""
    told = os.environ.get(TOLD)
    with quick_compiles(Path(told) if told else None):
        yield


def prepare() -> None:
    """Build what all builds share, before a test takes away what that needs: a disk, a compiler."""
    from fusec.runtime.kernels import cpp_kernel

    told = os.environ.get(TOLD)
    if told:
        _precompiled(Path(told), cpp_kernel.vector_width())


@contextmanager
def quick_compiles(folder: Path | None) -> Iterator[None]:
    """Keep torch from what it does in each compile and nobody reads: a tenth of the time.

    Dynamo times guards with cold caches, collects garbage and writes down its configuration.
    AOTAutograd prints its graphs, and makes tensors for generators as arguments, which fusec has
    none of.

    Args:
        folder: of what is built once; None builds kernels as users do.
    """
    import torch  # local: who starts workers does without it

    graphs = "torch._functorch._aot_autograd.graph_compile"
    with (
        mock.patch("torch._dynamo.utils._get_dynamo_config_for_logging", lambda: ""),
        mock.patch("torch._dynamo.utils._scrubbed_inductor_config_for_logging", lambda: ""),
        mock.patch("torch._decomp.decompositions_for_rng.PhiloxStateTracker.reset"),
        mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0),
        mock.patch(f"{graphs}._log_joint_graph", lambda *_: None),
        mock.patch(f"{graphs}._log_fw_bw_graphs", lambda *_: (None, None)),
        torch._dynamo.config.patch(run_gc_after_compile=False),
        _quick_build(folder),
    ):
        yield


@contextmanager
def _quick_build(folder: Path | None) -> Iterator[None]:
    """Take most of g++'s time: ``-Og``, and what is read once in place of often."""
    from fusec.runtime.kernels import (
        cpp_kernel,  # local: the options are read after `pytest_configure`
    )

    if folder is None:
        yield
        return
    quicker = functools.partial(_build, cpp_kernel.build, folder)
    with (
        mock.patch.object(cpp_kernel, "build", quicker),
        mock.patch.dict(os.environ, {TOLD: str(folder)}),
    ):
        yield


def _build(
    plainly: Callable[..., bytes],
    folder: Path,
    unit: str,
    options: Any,
    flags: Sequence[str] = ("-march=native",),
    more: Sequence[str] = (),
) -> bytes:
    """Build a translation unit; one that begins with the prelude, behind a precompiled one."""
    from fusec.runtime.kernels import cpp_kernel

    prelude, header, libraries = _precompiled(folder, cpp_kernel.vector_width())
    kernels = unit.removeprefix(prelude)
    if len(unit) > LARGE and kernels == unit and not more:
        return _built_once(folder, lambda: plainly(unit, options, (*flags, QUICK)), unit, flags)
    if kernels == unit or options.cxx is not None or more:
        return plainly(unit, options, (*flags, QUICK), more)
    named = () if options.native else libraries  # what runs without Python is linked as users do
    return plainly(f'#include "{header}"\n{kernels}', options, (*flags, QUICK, *named))


def _built_once(folder: Path, build: Callable[[], bytes], *facts: object) -> bytes:
    """Return what the first worker that asks builds: the emulator's interpreter takes seconds."""
    kept = folder / hashlib.sha256(repr(facts).encode()).hexdigest()
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            kept.write_bytes(build())
    return kept.read_bytes()


@functools.cache
def _precompiled(folder: Path, width: int) -> tuple[str, Path, Sequence[str]]:
    """Return the prelude, a header of it beside which lies what g++ makes of it, and libraries.

    The first process that asks makes them, for a width of vectors: a test may have another one. A
    compiler that does not know such files reads the header. Of all libraries that g++ links with,
    kernels need libgomp alone, and of that its name: reading them all is a third of g++'s time.
    """
    from fusec.codegen.cpp.prelude import prelude
    from fusec.runtime.kernels import cpp_kernel

    text = prelude(width)
    made, compiler = folder / f"made{width}", cpp_kernel.find_compiler(None)
    made.mkdir(parents=True, exist_ok=True)
    with FileLock(made / "lock"):
        if not (made / "prelude.h").exists():
            _precompile(text, made, compiler)
    named = made / "libgomp.so"
    if not named.exists():
        return text, made / "prelude.h", ()
    libraries = ("-nostdlib", "-Wl,--no-as-needed", str(named), "-Wl,--as-needed")
    return text, made / "prelude.h", libraries


def _precompile(text: str, place: Path, compiler: str | None) -> None:
    """Write the header, and beside it its precompiled form and a library of libgomp's name.

    The header comes last: who finds it takes all for made.
    """
    header = place / "prelude.h"
    (place / "text.h").write_text(text)
    if compiler is not None:
        _build_beside(header, compiler)
    (place / "text.h").rename(header)


def _build_beside(header: Path, compiler: str) -> None:
    from fusec.runtime.kernels import cpp_kernel

    place = header.parent
    # A flag for the linker makes g++ link a library in the place of the precompiled header.
    flags = [flag for flag in cpp_kernel.FLAGS if not flag.startswith("-Wl,")]
    command = [
        compiler,
        *flags,
        *cpp_kernel.OPTIMISE,
        QUICK,
        "-x",
        "c++-header",
        str(place / "text.h"),
    ]
    subprocess.run([*command, "-o", f"{header}.gch"], check=True)
    if Path(compiler).name == "g++" and sys.platform == "linux":
        named = str(place / "libgomp.so")
        command = [compiler, "-shared", "-nostdlib", "-x", "c", os.devnull]
        subprocess.run([*command, "-Wl,-soname,libgomp.so.1", "-o", named], check=True)
