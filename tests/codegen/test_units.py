"""Translation units of a graph: large graphs have several, compiled at the same time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from traceback import walk_stack

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.driver import compiler, pipeline
from fusec.driver.trace import Trace
from fusec.errors import BuildError, IndexOutOfRange, NotWritable
from fusec.export.native import add_native
from fusec.options import Options
from fusec.runtime.kernels import cpp_kernel
from tests.calls import Call, calls_of
from tests.limits import descriptors_up_to
from tests.support import BACKEND, tune

pytestmark = pytest.mark.skipif(BACKEND != "fusec", reason="is about the C++ compiler")
OPTIONS = {"strict": True, "autotune": False, "cache": False, "verify": False}


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """The prints of units, where few kernels are worth a unit of their own."""
    tune(monkeypatch, "code", unit_text=1000)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with calls_of(pipeline.cpp_units) as libraries:
        yield libraries
    torch.set_num_threads(threads)


class Blocks(nn.Module):
    """Norms of lengths that lie on a line, so that one function is shared, between products."""

    def __init__(self) -> None:
        super().__init__()
        sizes = range(48, 48 + 16 * 5, 16)
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(F.layer_norm(x.sin() * 2, x.shape[1:])).softmax(1)
        return F.gelu(x[rows].cumsum(1)).exp()


@pytest.mark.slow
def test_units_together_are_a_graph(units: list[Call]) -> None:
    torch.manual_seed(0)
    model, x, rows = Blocks(), torch.randn(7, 48), torch.tensor([3, 0, 6])
    found = []
    for threads in (1, 2):
        torch._dynamo.reset()
        options = {**OPTIONS, "threads": threads}
        compiled = torch.compile(model, backend="fusec", options=options)
        model.zero_grad()
        made = compiled(x, rows)
        made.square().sum().backward()
        found.append([made, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))
    torch.testing.assert_close(found[0][0], model(x, rows))
    printed = [call.result for call in units]
    assert [len(parts) for parts in printed] == [1, 1, 2, 2]
    shared = "static __attribute__((noinline)) void"  # whose callers are in its unit
    assert any(line.startswith(shared) for part in printed[3] for line in part.splitlines())
    assert "_to_k" in printed[2][0]  # a run, of kernels in several units
    with pytest.raises(IndexOutOfRange):
        compiled(x, torch.tensor([3, 0, 7]))


def test_a_library_for_programs_without_python_is_one_unit(units: list[Call]) -> None:
    options = Options.from_compile(None, {**OPTIONS, "native": True})
    gm = make_fx(lambda x: (x.sin().sum(0).exp(), x.cos().sum(1)))(torch.ones(9, 700))
    addition = compiler.Addition("", partial(add_native, ()))
    compiler.compile_entry(gm, "forward", options, Trace("forward"), addition)
    assert [len(call.result) for call in units] == [1]


def test_a_unit_that_does_not_compile_is_named() -> None:
    good, bad = "int f;\n", "int g() { return nothing; }\n"
    with pytest.raises(BuildError, match=r"(?s)kernels2\.cpp.*nothing"):
        cpp_kernel.build(good, Options(), (cpp_kernel.NATIVE,), (good, bad))
    with pytest.raises(BuildError, match="multiple definition of `f'"):
        cpp_kernel.build(good, Options(), (cpp_kernel.NATIVE,), (good,))


def test_where_a_second_compiler_cannot_start_the_first_is_ended(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    options = Options(cxx=str(compiler))
    with (
        calls_of(subprocess.Popen.__init__) as begun,
        descriptors_up_to(4),  # what starts one has four open, of which one stays
        pytest.raises(NotWritable, match="Too many open files"),
    ):
        cpp_kernel.build("", options, (cpp_kernel.NATIVE,), ("",))
    *_, first, second = (call.arguments["self"] for call in begun)
    assert second.args[0] == first.args[0] == str(compiler)
    assert first.wait() == -signal.SIGKILL


def test_who_is_interrupted_leaves_no_compiler_behind(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/$$.pid\nexec sleep 60\n")
    compiler.chmod(0o755)

    main = threading.get_ident()

    def is_waiting() -> bool:
        """Return True when both run and this thread waits for the first: it may start none now."""
        frames = walk_stack(sys._current_frames()[main])
        known = "communicate" in (frame.f_code.co_name for frame, _ in frames)
        return known and len(list(tmp_path.glob("*.pid"))) == 2

    def interrupt() -> None:
        while not is_waiting():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as xdist's workers do
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            cpp_kernel.build("", Options(cxx=str(compiler)), (cpp_kernel.NATIVE,), ("",))
    finally:
        signal.signal(signal.SIGINT, ignored)
    for started in tmp_path.glob("*.pid"):
        with contextlib.suppress(ChildProcessError):  # of one that has been waited for
            assert os.waitpid(int(started.stem), 0)[1] == signal.SIGKILL
