"""What is made beside this process's work is waited for, once, and nothing of it is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.driver import backend
from fusec.driver.build import BUILDS
from fusec.driver.compiler import compile_graph
from fusec.errors import BuildError
from fusec.options import Options
from fusec.runtime.kernels.background import Background, wait_for_all, when_ready
from tests.calls import calls_of
from tests.planted import fail_to_build
from tests.support import BACKEND

OPTIONS = {"strict": True, "autotune": False, "verify": False}


def test_a_result_is_made_beside_and_waited_for() -> None:
    go = threading.Event()

    def work() -> int:
        go.wait()
        return 3

    made = Background(work)
    go.set()
    assert [made.result(), made.result()] == [3, 3]


def test_the_interpreter_waits_for_what_a_daemon_has_begun() -> None:
    started: list[Background[int]] = []
    daemon = threading.Thread(target=lambda: started.append(Background(lambda: 3)), daemon=True)
    daemon.start()
    daemon.join()
    assert not started[0]._thread.daemon and started[0].result() == 3


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    made = Background(lambda: 1 // 0)
    wait_for_all()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            made.result()


def test_a_fork_waits_and_its_child_has_the_result() -> None:
    made = Background(lambda: time.sleep(0.2) or 5)
    child = os.fork()
    if child == 0:
        os._exit(made.result())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_a_fork_waits_for_a_first_call_of_another_thread() -> None:
    begun = threading.Event()

    def bind():
        begun.set()
        time.sleep(0.3)
        return len

    call = when_ready(bind)
    thread = threading.Thread(target=call, args=([1],))
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a child that waits for a thread which it does not have
        os._exit(call([1, 2, 3]))
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_callable_is_bound_once_by_its_first_call() -> None:
    bound = []

    def bind():
        bound.append(1)
        return lambda args: sum(args)

    call = when_ready(bind)
    assert bound == []
    threads = [threading.Thread(target=call, args=([1, 2],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert call([1, 2]) == 3
    assert bound == [1]


def test_a_first_call_that_raises_is_tried_again() -> None:
    tries = iter([BuildError(["c++"], "bad", 1), None])

    def bind():
        error = next(tries)
        if error is not None:
            raise error
        return len

    call = when_ready(bind)
    with pytest.raises(BuildError):
        call([1])
    assert call([1]) == 1


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The targets of what is built; each build begins when its graph's compile has returned."""
    if BACKEND != "fusec":
        pytest.skip("is about the C++ compiler")
    build, targets = BUILDS["cpp"], []

    def late(compiled, target, options):
        end = time.monotonic() + 30
        while compiles[-1].result is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        targets.append(target)
        return build(compiled, target, options)

    monkeypatch.setitem(BUILDS, "cpp", late)
    with calls_of(backend.compile_graph) as compiles:
        yield targets


def test_kernels_are_built_while_the_compile_goes_on(built: list[str], tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * x.exp()

    torch._dynamo.reset()
    options = {**OPTIONS, "cache_dir": str(tmp_path)}
    x = torch.linspace(-1, 1, 40).requires_grad_()
    made = torch.compile(model, backend="fusec", options=options)(x)
    torch.testing.assert_close(made, model(x))
    (mine,) = torch.autograd.grad(made.sum(), x)
    (eagers,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(mine, eagers)
    assert len(built) == 2


def test_a_graph_equal_to_another_is_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if BACKEND != "fusec":
        pytest.skip("is about the C++ compiler")
    build, go, builds = BUILDS["cpp"], threading.Event(), []

    def late(compiled, *args):
        assert go.wait(30)
        builds.append(compiled)
        return build(compiled, *args)

    monkeypatch.setitem(BUILDS, "cpp", late)
    x = torch.linspace(-1, 1, 40)
    gm = make_fx(lambda x: (x.sin().exp(),), tracing_mode="fake")(x)
    options = Options.from_compile(None, {**OPTIONS, "cache_dir": str(tmp_path)})
    first = compile_graph(gm, "forward", options)
    threading.Timer(0.2, go.set).start()
    second = compile_graph(gm, "forward", options)
    for call in (first, second):
        torch.testing.assert_close(call([x])[0], x.sin().exp())
    assert len(builds) == 1


@pytest.mark.skipif(BACKEND != "fusec", reason="is about the C++ compiler")
@pytest.mark.parametrize("strict", [False, True])
def test_a_compiler_that_fails_late_breaks_no_model(
    strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_build(monkeypatch, BuildError(["c++"], "internal compiler error", 4))
    options = {**OPTIONS, "strict": strict, "cache_dir": str(tmp_path)}
    compiled = torch.compile(lambda x: x.sin() + 1, backend="fusec", options=options)
    x = torch.linspace(-1, 1, 40)
    if strict:
        with pytest.raises(BuildError):
            compiled(x)
        return
    with pytest.warns(UserWarning, match="(?s)runs as eager kernels.*internal compiler error"):
        torch.testing.assert_close(compiled(x), x.sin() + 1)
    torch.testing.assert_close(compiled(x), x.sin() + 1)


def test_a_process_ends_after_what_it_makes() -> None:
    script = """
import time
from fusec.runtime.kernels.background import Background
Background(lambda: time.sleep(0.3) or print("stored"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "stored\n"
