"""Blobs of the cache as files for loaders: in memory where the kernel has that, else on disk."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import nullcontext

import pytest

from fusec.runtime.cache.memory_file import as_file
from tests.limits import descriptors_up_to


def test_a_blob_s_file_is_what_was_verified_and_cannot_be_changed() -> None:
    path = as_file(b"verified")
    assert path.read_bytes() == b"verified"
    with pytest.raises(OSError), open(path, "r+b") as file:
        file.write(b"changed")
    assert path.read_bytes() == b"verified"


def test_equal_blobs_share_one_file_and_others_do_not() -> None:
    assert as_file(b"one") == as_file(bytes(bytearray(b"one")))
    assert as_file(b"one") != as_file(b"two")


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
    libraries: dict[str, bytes],
    memory: bool,
) -> None:
    for answer, library in libraries.items():
        with nullcontext() if memory else descriptors_up_to(4):  # files in memory keep one each
            path = as_file(library + bytes(memory))
        assert path.is_relative_to("/proc") == memory
        assert ctypes.CDLL(str(path)).answer() == int(answer)
        if not memory:
            assert path.parent.stat().st_mode & 0o777 == 0o700


def test_no_path_is_given_out_twice_where_others_close_descriptors() -> None:
    """A loader takes a path that it knows for what it has loaded from there."""
    path = as_file(b"before a daemon closes all descriptors")
    if not path.is_relative_to("/proc"):
        pytest.skip("no files in memory")
    os.close(int(path.name))
    again = as_file(b"before a daemon closes all descriptors")
    assert again != path and again.read_bytes() == b"before a daemon closes all descriptors"
    os.close(int(again.name))
    assert as_file(b"behind that") not in (path, again)
