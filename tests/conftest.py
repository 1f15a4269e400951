"""What every test shares: markers that deselect or skip, and a cache of the run's own."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests import long_tests, quick_build

# Torch and fusec are imported where they are used: who starts workers does without, and they wait.
DEVICES = ("nvidiactl", "dxg", "kfd")
"""What there is in /dev where there is a GPU: NVIDIA's driver, that of WSL, AMD's."""
M_PERTURB, SPOILT = -6, 0xA5
"""glibc's number of the setting, and what freed memory is filled with; what is allocated, with its
complement: 1.5e16 in f32 and bf16, which no index may be either."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/golden/*.txt")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--part", choices=("short", "long"), help="which of those not marked slow")
    parser.addoption("--torch-tests", metavar="PATH", help="run PyTorch's own, of its folder test")
    parser.addoption("--seed", type=int, default=0, help="of the random numbers of each test")


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module is imported: neither the user's settings, cache nor terminal may
    # decide what a test sees. Subprocesses inherit them.
    os.environ["COLUMNS"] = "100"
    for name in [name for name in os.environ if name.startswith("FUSEC_")]:
        del os.environ[name]
    directory = tempfile.mkdtemp(prefix="fusec-tests-")
    os.environ["FUSEC_CACHE_DIR"] = os.path.join(directory, "cache")
    # Workers of xdist begin with the environment of the process that starts them.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[quick_build.SHARED] = os.path.join(directory, "shared")
    # A race's winner differs from run to run, and so do the last bits of what it computes.
    os.environ["FUSEC_RACE_BUDGET_S"] = "0"
    _spoil_memory()
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def _spoil_memory() -> None:
    """Let glibc fill what is allocated, and what is freed, with bytes that are no result.

    Freed memory may hold just what a test expects: its last case's results, or eager's. What is
    never written would be right then, depending on what the allocator hands out.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has it
    if mallopt is not None:
        mallopt(M_PERTURB, SPOILT)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what only a device can run, where there is none: nothing of it is collected."""
    only = collection_path == Path(__file__).parent / "gpu"
    return True if only and not has_device() else None


def pytest_report_header() -> str | None:
    return None if has_device() else "tests/gpu: left out, for there is no CUDA device"


@functools.cache
def has_device() -> bool:
    if not any(Path("/dev", name).exists() for name in DEVICES):
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        quick = _sampled(_firsts(item for item in items if not _has(item, "slow")))
        if part := config.getoption("--part"):
            quick = [
                item for item in quick if long_tests.is_listed(item.nodeid) == (part == "long")
            ]
        config.hook.pytest_deselected(items=list(set(items).difference(quick)))
        items[:] = quick
    if not has_device():
        for item in items:
            if _has(item, "gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has(item: pytest.Item, mark: str) -> bool:
    """Return whether a test has a mark; its keywords name the checkout's folders, too."""
    return item.get_closest_marker(mark) is not None


def _firsts(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests, and of one function's cases that are marked ``first`` the first one.

    A case that is compiled need not be captured, too: what is compiled was captured before.
    """
    seen: set[tuple[object, str]] = set()
    twins: set[tuple[object, str]] = set()
    kept = []
    for item in items:
        key = item.parent, getattr(item, "originalname", item.name)
        if not _has(item, "first"):
            kept.append(item)
        elif key not in seen:
            seen.add(key)
            kept.append(item)
            twins.add((item.parent, item.name.replace("compiled", "captured")))
    return (one for one in kept if _has(one, "first") or (one.parent, one.name) not in twins)


def _sampled(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests, and of one marked ``sampled(n)`` the first case and every n-th after it.

    An n that shares no factor with the numbers of values walks a diagonal of their product.
    """
    seen: Counter[tuple[object, str]] = Counter()
    kept = []
    for item in items:
        marker = item.get_closest_marker("sampled")
        key = item.parent, getattr(item, "originalname", item.name)
        if marker is None or _has(item, "first") or seen[key] % marker.args[0] == 0:
            kept.append(item)
        seen[key] += 1
    return kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a test and what is set up for it draw the same numbers, whatever ran before it.

    Which tests a worker has run, and how often they drew, differs from run to run.
    """
    import torch  # local: as above

    seed = item.config.getoption("--seed")
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Wait for kernels that a test has left a compiler with, while all is as the test set it up.

    The next test may count what is built, and would count these if they took long.
    """
    from fusec.runtime.kernels.background import wait_for_all  # local: as above

    wait_for_all()


def pytest_collection_finish() -> None:
    # What has been imported stays: the collector need not look through it in each of its rounds,
    # nor begin one for each 700 objects of a trace. What is old it leaves alone: caches of torch
    # and fusec are some million objects, which a full round visits in seconds.
    gc.freeze()
    gc.set_threshold(10_000, 20, 1_000)


@pytest.fixture(autouse=True, scope="module")
def _what_earlier_modules_left_is_old() -> None:
    """Spare a collection in a test what earlier modules left: late in a run, it is seconds."""
    gc.freeze()


_NOBODY = logging.Logger("nobody")


@pytest.fixture(autouse=True)
def _torch_s_trace_has_no_listener() -> None:
    """Keep pytest off the logger of ``TORCH_TRACE``, to which each compile prints all its graphs.

    Pytest listens to whatever does not propagate when a test begins. So fusec would not start from
    its cache, either. What has a listener of its own propagates to nobody: torch's handlers would
    print it. Torch sets the logger up anew whenever a program sets its logs.
    """
    from fusec.torch_interior import trace_log  # local: as above

    trace_log.propagate = True
    trace_log.parent = _NOBODY
    for handler in list(trace_log.handlers):
        if type(handler).__module__.startswith("_pytest."):
            trace_log.removeHandler(handler)


@pytest.fixture(autouse=True)
def _torch_has_the_threads_it_had() -> Iterator[None]:
    """Undo what a benchmark sets: a program that is saved later would ask for as many threads."""
    import torch  # local: as above

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _modules_are_found_where_they_were() -> Iterator[None]:
    """Undo what the command line does in its own process: the folder of a model is on the path."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True, scope="session")
def _observers_are_there_and_say_nothing_at_the_end() -> Iterator[None]:
    """Import the observers that programs have; leave out what ``verify`` reports at exit."""
    import fusec.backend  # noqa: F401  local: as above
    from fusec.tools.verify import kernels

    yield
    kernels._tallies.clear()


@pytest.fixture(autouse=True, scope="session")
def _compiles_are_quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep torch from logging; in a run without --slow, build kernels for their values alone.

    With --slow, kernels are built as users build them.
    """
    slow = request.config.getoption("--slow")
    with quick_build.quick_compiles(None if slow else Path(os.environ[quick_build.SHARED])):
        yield


@pytest.fixture
def unfrozen_heap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collect as in a process whose user has frozen no heap, unlike this one."""
    from fusec.runtime import heap  # local: as above

    before = gc.get_threshold()
    gc.unfreeze()
    gc.collect(1)  # so that none is due in the midst of a test, after which what is new is old
    monkeypatch.setattr(heap, "_is_users", False)
    yield
    gc.set_threshold(*before)
    gc.enable()
    gc.freeze()  # as the tests behind want it


@pytest.fixture
def own_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what a test plants into lists of stages out of them when the test ends."""
    from fusec.driver import backend, stages  # local: as above

    for module, listed in ((stages, "FUSE"), (backend, "JOINT")):
        monkeypatch.setattr(module, listed, getattr(module, listed))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a check that a text is what ``tests/golden/NAME.txt`` says."""
    update = request.config.getoption("--update-goldens")

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / f"{name}.txt"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        assert text + "\n" == path.read_text(encoding="utf-8"), "see --update-goldens"

    return check
