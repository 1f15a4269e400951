"""The promises of the cache on disk: nothing lost, nothing wrong, nothing that ends a compile."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusec.driver import compiler
from fusec.options import Options
from fusec.runtime.cache import store as cache_module
from fusec.runtime.cache.store import MEMORY_BYTES, Cache, fingerprint, open_cache
from fusec.runtime.kernels.processor import cpu_features
from tests.calls import calls_of
from tests.limits import files_up_to

MB = 1 << 20
BLOBS = {"kernels.so": b"\x7fELF" + bytes(range(256)) * 40, "plan.json": b"{}", "empty": b""}


def fresh(directory: Path, limit_bytes: int = MB) -> Cache:
    """A cache as the next process would see it: nothing in memory."""
    return Cache(directory, limit_bytes)


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.fusec"))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_kernels_are_known_by_their_bytes_for_a_race_may_end_otherwise() -> None:
    first, other, again = (
        compiler._load(
            {"manifest.json": b'{"kernels": []}', "kernels.so": library}, torch.device("cpu")
        )
        for library in (b"first", b"other", b"first")
    )
    assert again is first and other is not first


# Round trip.


def test_what_was_stored_is_loaded_by_the_next_process(directory: Path) -> None:
    fresh(directory).store("k", BLOBS)
    assert fresh(directory).load("k") == BLOBS
    assert fresh(directory).load("other") is None
    assert len(files_of(directory)) == 1


def test_a_second_load_in_one_process_leaves_the_disk_alone(directory: Path) -> None:
    cache = fresh(directory)
    cache.store("k", BLOBS)
    shutil.rmtree(directory)
    assert cache.load("k") == BLOBS
    cache.forget()
    assert cache.load("k") is None


def test_memory_drops_what_was_used_longest_ago(
    directory: Path,
) -> None:
    cache, large = Cache(directory, 0), bytes(MEMORY_BYTES * 2 // 5)
    cache.store("a", {"x": large})
    cache.store("b", {"x": large})
    assert cache.load("a") is not None
    cache.store("c", {"x": large})
    assert [key for key in "abc" if cache.load(key) is not None] == ["a", "c"]


def test_a_caller_who_changes_its_dict_does_not_change_the_cache(directory: Path) -> None:
    cache = fresh(directory)
    given = dict(BLOBS)
    cache.store("k", given)
    given.clear()
    (cache.load("k") or {}).clear()
    assert cache.load("k") == BLOBS


def test_files_and_directory_belong_to_the_user_alone(directory: Path) -> None:
    fresh(directory).store("k", BLOBS)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert files_of(directory)[0].stat().st_mode & 0o777 == 0o600


def test_names_of_files_tell_nothing_of_the_key(directory: Path) -> None:
    fresh(directory).store("../../escape/k", BLOBS)
    assert [file.parent for file in files_of(directory)] == [directory]
    assert fresh(directory).load("../../escape/k") == BLOBS


# Damage.


def stored_file(directory: Path) -> Path:
    fresh(directory).store("k", BLOBS)
    (file,) = files_of(directory)
    return file


def test_each_flipped_bit_is_a_miss(directory: Path) -> None:
    file = stored_file(directory)
    sound = file.read_bytes()
    places = [*range(120), *range(120, len(sound), 97), len(sound) - 1]
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << (place % 8)
        file.write_bytes(damaged)
        assert fresh(directory).load("k") is None, place
        assert not file.exists(), "a damaged entry stayed"
    file.write_bytes(sound)
    assert fresh(directory).load("k") == BLOBS


@pytest.mark.parametrize("keep", [0, 1, 47, 48, 100, 300, -1])
def test_a_truncated_entry_is_a_miss(directory: Path, keep: int) -> None:
    file = stored_file(directory)
    file.write_bytes(file.read_bytes()[:keep])
    assert fresh(directory).load("k") is None
    assert not file.exists()


def test_an_entry_with_more_bytes_than_it_says_is_a_miss(directory: Path) -> None:
    file = stored_file(directory)
    file.write_bytes(file.read_bytes() + b"x")
    assert fresh(directory).load("k") is None


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x04N.", bytes(4096)])
def test_a_foreign_file_is_a_miss(directory: Path, content: bytes) -> None:
    file = stored_file(directory)
    file.write_bytes(content)
    assert fresh(directory).load("k") is None


def test_an_entry_renamed_to_another_key_is_a_miss(directory: Path) -> None:
    file = stored_file(directory)
    fresh(directory).store("other", {"x": b"other"})
    (other,) = set(files_of(directory)) - {file}
    os.replace(other, file)
    assert fresh(directory).load("k") is None


def test_a_damaged_entry_is_replaced_by_the_next_store(directory: Path) -> None:
    stored_file(directory).write_bytes(b"torn")
    cache = fresh(directory)
    assert cache.load("k") is None
    cache.store("k", BLOBS)
    assert fresh(directory).load("k") == BLOBS


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_an_entry_that_is_no_plain_file_is_a_miss(directory: Path, kind: str) -> None:
    file = stored_file(directory)
    elsewhere = directory.parent / "elsewhere"
    os.replace(file, elsewhere)
    if kind == "symlink":
        file.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    assert fresh(directory).load("k") is None


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], None]:
    """Return a function that lets each call of one function of the system fail."""

    def install(call: str, error: BaseException) -> None:
        def fail(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(os, call, fail)

    return install


def test_a_writer_that_dies_leaves_no_entry(
    directory: Path, failing: Callable[[str, BaseException], None]
) -> None:
    failing("fsync", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fresh(directory).store("k", BLOBS)
    assert list(directory.iterdir()) == []


# Several processes and threads.


def _use_one_key(directory: Path, worker: int, barrier: threading.Barrier) -> None:
    barrier.wait()
    for turn in range(5):
        cache = fresh(directory)
        found = cache.load("shared")
        assert found is None or found == BLOBS
        cache.store("shared", BLOBS)
        cache.store(f"{worker}-{turn}", {"x": f"{worker}-{turn}".encode()})
        assert fresh(directory).load("shared") == BLOBS
        assert fresh(directory).load(f"{worker}-{turn}") is not None


def test_six_processes_on_one_key_lose_nothing(directory: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(6)
    workers = [
        context.Process(target=_use_one_key, args=(directory, worker, barrier))
        for worker in range(6)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert len(files_of(directory)) == 1 + 6 * 5
    assert not list(directory.glob(".*.tmp"))


# Faults of the machine: one warning, and on.


def assert_memory_only(cache: Cache, caplog: pytest.LogCaptureFixture, said: str) -> None:
    """The cache works in memory and has warned once, in words that match `said`."""
    cache.store("k", BLOBS)
    cache.store("l", BLOBS)
    assert cache.load("k") == BLOBS
    assert cache.load("never stored") is None
    (warning,) = warnings_in(caplog)
    assert re.search(said, warning), warning
    assert "FUSEC_CACHE_DIR" in warning


def test_a_symlinked_directory_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert_memory_only(fresh(tmp_path / "link"), caplog, "symbolic link")
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777])
def test_a_directory_that_others_can_write_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    sound = fresh(tmp_path / "c")
    sound.store("planted", BLOBS)
    (tmp_path / "c").chmod(mode)
    cache = fresh(tmp_path / "c")
    assert cache.load("planted") is None
    assert_memory_only(cache, caplog, "can be written by others")
    assert "others" in (cache.stats().problem or "")


def test_a_directory_of_another_user_is_refused(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh(directory).store("planted", BLOBS)
    if os.geteuid() == 0:
        os.chown(directory, 54321, -1)
    else:
        directory = Path("/usr")
    cache = fresh(directory)
    assert cache.load("planted") is None
    assert_memory_only(cache, caplog, "belongs to user")


@pytest.mark.parametrize("call", ["mkdir", "open", "replace", "fsync"])
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "Read-only"),
        (errno.EACCES, "Permission denied"),
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "is full"),
        (errno.EIO, "Input/output"),
    ],
)
def test_a_disk_that_refuses_costs_one_warning(
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    failing: Callable[[str, BaseException], None],
    call: str,
    number: int,
    said: str,
) -> None:
    directory.parent.mkdir()
    if call != "mkdir":
        directory.mkdir(mode=0o700)

    failing(call, OSError(number, os.strerror(number)))
    cache = fresh(directory)
    assert_memory_only(cache, caplog, said)
    monkeypatch.undo()
    assert files_of(directory) == []
    assert list(directory.glob(".*.tmp")) == []


def test_a_disk_without_room_leaves_the_older_entry_whole(directory: Path) -> None:
    fresh(directory).store("k", BLOBS)
    with files_up_to(1000):
        fresh(directory).store("k", {"x": bytes(2000)})
    assert fresh(directory).load("k") == BLOBS
    assert len(list(directory.iterdir())) == 1


@pytest.mark.parametrize("place", ["/proc/nope", "/proc/nope/cache"])
def test_a_place_where_no_directory_can_be_costs_one_warning(
    caplog: pytest.LogCaptureFixture, place: str
) -> None:
    assert_memory_only(fresh(Path(place)), caplog, "cannot be made")


def test_a_check_writes_a_file_and_leaves_none(directory: Path, tmp_path: Path) -> None:
    assert fresh(directory).check() is None
    assert list(directory.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    assert "Not a directory" in str(fresh(tmp_path / "file").check())
    assert "cannot be made" in str(fresh(Path("/proc/nope")).check())


def test_a_file_in_the_directorys_place_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("mine")
    assert_memory_only(fresh(tmp_path / "file"), caplog, "Not a directory|exists")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_vanishes_is_made_again(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = fresh(directory)
    cache.store("k", BLOBS)
    shutil.rmtree(directory)
    cache.store("l", BLOBS)
    assert fresh(directory).load("l") == BLOBS
    assert warnings_in(caplog) == []


def test_a_home_given_by_a_tilde_that_nobody_has_costs_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert_memory_only(Cache(Path("~nobody-of-this-name/x"), MB), caplog, "no home directory")


def _store_without_a_home() -> None:
    os.setuid(54321)  # which is in no user database: containers like to run with such an id
    for name in ("HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    cache = Cache(None, MB)
    cache.store("k", BLOBS)
    assert cache.load("k") == BLOBS
    assert "no home directory" in (cache.stats().problem or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_without_a_home_directory_entries_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o777)
    process = multiprocessing.get_context("fork").Process(target=_store_without_a_home)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert list(tmp_path.iterdir()) == [], "a directory named ~ was made"


# Eviction and clearing.


def test_the_entry_used_longest_ago_is_evicted_first(directory: Path) -> None:
    size = 1000
    for key in "abc":
        fresh(directory).store(key, {"x": bytes(size)})
        assert fresh(directory).load(key) is not None
        time.sleep(0.02)  # uses have an order: a new file's time is that of the last tick
    assert fresh(directory).load("a") is not None
    time.sleep(0.02)
    fresh(directory, limit_bytes=4 * size).store("d", {"x": bytes(size)})
    kept = [key for key in "abcd" if fresh(directory).load(key) is not None]
    assert kept == ["a", "c", "d"]
    assert fresh(directory).stats().bytes <= 4 * size


def test_all_files_are_looked_at_once_for_many_entries(directory: Path) -> None:
    cache = fresh(directory)
    with calls_of(cache_module._files_in) as looks:
        for number in range(10):
            cache.store(f"k{number}", {"x": bytes(1000)})
    assert len(looks) == 1


def test_what_one_process_stores_never_exceeds_the_limit(directory: Path) -> None:
    cache = fresh(directory, limit_bytes=20_000)
    for number in range(60):
        cache.store(f"k{number}", {"x": bytes(700)})
        assert sum(file.stat().st_size for file in files_of(directory)) <= 20_000
    assert fresh(directory, limit_bytes=20_000).stats().entries > 15


def test_an_entry_larger_than_the_cache_is_not_written(directory: Path) -> None:
    cache = fresh(directory, limit_bytes=500)
    cache.store("k", {"x": bytes(400)})
    cache.store("big", {"x": bytes(1000)})
    assert cache.load("big") is not None
    assert fresh(directory).load("big") is None


def test_temporary_files_of_dead_writers_are_removed_and_young_ones_kept(directory: Path) -> None:
    fresh(directory).store("k", BLOBS)
    old = directory / f".{'0' * 64}.{'1' * 16}.tmp"
    young = directory / f".{'0' * 64}.{'2' * 16}.tmp"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    fresh(directory).store("l", BLOBS)
    assert not old.exists()
    assert young.exists()


def test_an_entry_of_any_age_stays_while_there_is_room(directory: Path) -> None:
    os.utime(stored_file(directory), (1, 1))
    fresh(directory).store("l", BLOBS)
    assert fresh(directory).load("k") == BLOBS


def test_files_of_others_are_never_removed(directory: Path) -> None:
    directory.mkdir(parents=True, mode=0o700)
    for name in ("notes.txt", "k.fusec", ".hidden.tmp"):
        (directory / name).write_bytes(bytes(5000))
        os.utime(directory / name, (1, 1))
    cache = fresh(directory, limit_bytes=2000)
    cache.store("k", {"x": bytes(1000)})
    cache.store("l", {"x": bytes(1000)})
    assert cache.clear() == 1
    assert sorted(f.name for f in directory.iterdir()) == [".hidden.tmp", "k.fusec", "notes.txt"]


def test_clear_empties_memory_and_disk(directory: Path) -> None:
    cache = fresh(directory)
    cache.store("k", BLOBS)
    cache.store("l", BLOBS)
    assert cache.clear() == 2
    assert cache.load("k") is None
    assert cache.stats().entries == 0


def test_stats_count_entries_and_bytes(directory: Path) -> None:
    assert fresh(directory).stats().entries == 0
    cache = fresh(directory)
    cache.store("k", BLOBS)
    stats = cache.stats()
    assert (stats.entries, stats.problem) == (1, None)
    assert stats.bytes == files_of(directory)[0].stat().st_size


def test_a_limit_of_zero_leaves_the_disk_alone(directory: Path) -> None:
    cache = fresh(directory, limit_bytes=0)
    cache.store("k", BLOBS)
    assert cache.load("k") == BLOBS
    assert not directory.exists()
    assert "off" in (cache.stats().problem or "")


# Keys and opening.


def test_equal_settings_share_one_cache(directory: Path) -> None:
    options = Options(cache_dir=str(directory))
    assert open_cache(options) is open_cache(Options(cache_dir=str(directory), strict=True))
    assert open_cache(options).limit_bytes == options.cache_size_mb * MB
    assert open_cache(Options(cache=False, cache_dir=str(directory))).limit_bytes == 0


def test_a_tilde_in_the_directory_is_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache(Path("~/kernels"), MB).directory == tmp_path / "kernels"


def test_the_fingerprint_depends_on_sources_and_on_ptxas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def computed(*package: Path) -> str:
        fingerprint.cache_clear()
        return fingerprint(*package)

    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    prints = [computed()]
    assert computed() == prints[0]
    ptxas = tmp_path / "ptxas"
    ptxas.write_bytes(b"12.9")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    prints.append(computed())
    ptxas.write_bytes(b"13.0")
    prints.append(computed())
    other = tmp_path / "triton-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 0.1\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        prints.append(computed())
    package = tmp_path / "fusec"
    package.mkdir()
    for text in ("x = 1", "x = 2"):
        (package / "pass.py").write_text(text)
        prints.append(computed(package))
    fingerprint.cache_clear()
    assert len(set(prints)) == len(prints)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names those of x86")
def test_cpu_features_name_vector_extensions_and_nothing_else(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    lines = "model name\t: some CPU\nflags\t\t: fpu avx512f sse4_2 hypervisor avx2 arat\n"
    cpuinfo.write_text(lines * 2)
    assert cpu_features(cpuinfo) == "x86_64 avx2 avx512f sse4_2"
    assert cpu_features(tmp_path / "none")


def test_to_list_an_entry_is_no_use_of_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit_bytes=1 << 20)
    cache.store("key", {"a": b"1" * 5000})
    (file,) = (tmp_path / "cache").glob("*.fusec")
    os.utime(file, (1_000_000, 1_000_000))  # long ago: a read by others sets the time, even so
    for _ in range(2):
        (listed,) = cache.listing()
        assert listed.used == 1_000_000
