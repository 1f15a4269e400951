"""Blobs of the cache as files for loaders: in memory where the kernel has that, else on disk."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fusec.runtime import cache as cache_module
from fusec.runtime import memory_file
from tests.runtime.test_cache import BLOBS, fresh, warnings_in


def test_a_materialised_blob_is_what_was_verified_and_cannot_be_changed(directory: Path) -> None:
    cache = fresh(directory)
    cache.store("k", BLOBS)
    path = cache.materialise("k", "kernels.so")
    assert path is not None
    assert path.read_bytes() == BLOBS["kernels.so"]
    with pytest.raises(OSError), open(path, "r+b") as file:
        file.write(b"changed")
    assert path.read_bytes() == BLOBS["kernels.so"]


def test_equal_blobs_share_one_file_and_others_do_not(directory: Path) -> None:
    cache = fresh(directory)
    cache.store("k", {"x": b"one", "y": b"two"})
    cache.store("l", {"z": b"one"})
    assert cache.materialise("k", "x") == cache.materialise("l", "z")
    assert cache.materialise("k", "x") != cache.materialise("k", "y")


def test_a_blob_that_is_not_there_has_no_file(directory: Path) -> None:
    cache = fresh(directory)
    cache.store("k", BLOBS)
    assert cache.materialise("k", "nothing") is None
    assert cache.materialise("nothing", "kernels.so") is None


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two shared libraries, each with a function `answer` of its own."""
    compiler = shutil.which("cc") or shutil.which("g++") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    directory = tmp_path_factory.mktemp("libraries")
    built = {}
    for answer in ("41", "42"):
        source, library = directory / f"{answer}.c", directory / f"{answer}.so"
        source.write_text(f"int answer(void) {{ return {answer}; }}\n")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        built[answer] = library.read_bytes()
    return built


@pytest.mark.parametrize("memory", [True, False])
def test_libraries_load_from_their_files_each_its_own(
    directory: Path,
    libraries: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    memory: bool,
) -> None:
    monkeypatch.setattr(memory_file, "_files", {})
    if not memory:
        monkeypatch.delattr(os, "memfd_create")
    fresh(directory).store("k", libraries)
    cache = fresh(directory)
    for answer in libraries:
        path = cache.materialise("k", answer)
        assert path is not None
        assert path.is_relative_to("/proc") == memory
        assert ctypes.CDLL(str(path)).answer() == int(answer)
        if not memory:
            assert path.parent.stat().st_mode & 0o777 == 0o700


def test_no_place_for_a_file_is_no_file_and_one_warning(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = fresh(directory)
    cache.store("k", {"x": b"a blob that no other test made a file of"})

    def full(_: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module, "as_file", full)
    assert cache.materialise("k", "x") is None
    assert cache.materialise("k", "x") is None
    assert len(warnings_in(caplog)) == 1
