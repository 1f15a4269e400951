"""What users do to a process that compiles: threads, forks, hostile text, a machine that says no.

Faults of the cache's directory and of entries are in ``test_cache.py``; out of memory while ways
are timed is in ``test_autotune.py``.
"""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

import tests.triton_backend  # noqa: F401 (registers the backends)
from fusec.errors import EnvironmentProblem, NotWritable, describe_failure, warn_once
from fusec.options import Options
from fusec.runtime.kernels import cpp_kernel
from tests.limits import files_up_to
from tests.support import compile_with, since_2_13, without_compiler

FORKED = """
import os, signal, torch
torch.set_num_threads(2)

def f(x):
    return torch.softmax(x * 2 + 1, -1)

x = torch.randn(256, 512)
compiled = torch.compile(f, backend="fusec", options={"strict": True})
expected = compiled(x)
child = os.fork()
if not child:
    signal.alarm(120)
    torch.set_num_threads(1)  # as workers of a DataLoader do: OpenMP does not survive a fork
    same = torch.equal(compiled(x), expected)
    more = torch.compile(lambda x: torch.tanh(x) * 3, backend="fusec", options={"strict": True})
    close = torch.allclose(more(x), torch.tanh(x) * 3)
    os._exit(0 if same and close else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(compiled(x), expected)
"""


@pytest.mark.slow
def test_a_process_forks_after_a_compile(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        env={**os.environ, "FUSEC_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@since_2_13
def test_threads_compile_at_once_and_each_gets_its_own_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    x = torch.linspace(-2, 2, 96).reshape(8, 12)
    together = threading.Barrier(4)
    found: dict[int, torch.Tensor] = {}

    def work(k: int, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        together.wait()
        found[k] = fn(x)

    functions = [compile_with(_scaled_by(k % 2)) for k in range(4)]  # two of each: one key, twice
    threads = [threading.Thread(target=work, args=(k, fn)) for k, fn in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        torch.testing.assert_close(found[k], torch.tanh(x) * (k % 2 + 1) + x)


def _scaled_by(k: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (k + 1) + x

    return scaled


# Each stands in a comment of the user's line, in a name, or both: none may become code.
HOSTILE = (
    '"""',
    "'''",
    "*/ #error a",
    "ends in a backslash \\",
    "??/",  # a trigraph: a backslash to old compilers
    "{0} %s ${x} \\N{BULLET} \\x41",
    "\u2028 line separator \u0085 next line \x0c form feed",
    "\u202e reversed \u2066",
)


@pytest.mark.parametrize("backend", ["fusec", "triton_interpreter"])
def test_text_of_the_model_cannot_become_code(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    name = f"model {''.join(HOSTILE)}.py"
    shown = ["def model(x):\n", *(f"    x = torch.tanh(x) * 2  # {text}\n" for text in HOSTILE)]
    shown.append("    return x\n")
    monkeypatch.setitem(linecache.cache, name, (1, None, shown, name))
    plain = "".join(line.partition("  #")[0].rstrip("\n") + "\n" for line in shown)
    scope = {"torch": torch}
    exec(compile(plain, name, "exec"), scope)  # numbers its lines as the text above does
    model: Callable[[torch.Tensor], torch.Tensor] = scope["model"]
    x = torch.linspace(-1, 1, 40).reshape(4, 10)
    torch.testing.assert_close(compile_with(model, backend)(x), model(x))


@pytest.mark.parametrize("backend", ["fusec", "triton_interpreter"])
def test_names_of_the_model_cannot_become_code(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSEC_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for k, text in enumerate(HOSTILE):
                clean = text.replace(".", "")
                self.register_parameter(
                    f"int main {clean}", torch.nn.Parameter(torch.tensor(k + 1.0))
                )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for parameter in self.parameters():
                x = x * parameter
            return x

    model = Model()
    x = torch.linspace(-1, 1, 40).reshape(4, 10)
    with torch.no_grad():
        torch.testing.assert_close(compile_with(model, backend)(x), model(x))


def test_stages_are_written_of_a_graph_that_is_in_the_cache(tmp_path: Path) -> None:
    cache, written = str(tmp_path / "cache"), tmp_path / "stages"
    for directory in (None, written):
        torch._dynamo.reset()
        options = {"strict": True, "cache_dir": cache, "dump_dir": directory}
        compiled = torch.compile(lambda x: torch.tanh(x) + 1, backend="fusec", options=options)
        compiled(torch.ones(4))
    (source,) = written.glob("*/*-source-k0.cpp")
    assert "tanh" in source.read_text()


@pytest.mark.parametrize("action", ("exit 0", "while [ $1 != -o ]; do shift; done; echo > $2"))
def test_a_compiler_that_makes_no_library_is_named(tmp_path: Path, action: str) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{action}\n")
    compiler.chmod(0o755)
    with pytest.raises(EnvironmentProblem, match=r"c\+\+ wrote no shared library"):
        cpp_kernel.build("", Options(cxx=str(compiler)))


FULL, TOO_LARGE = "No space left on device", "File too large"


def compiler_that(folder: Path, does: str) -> Options:
    """Return options that name a compiler which does something else."""
    compiler = folder / "g++"
    compiler.write_text(f"#!/bin/sh\n{does}\n")
    compiler.chmod(0o755)
    return Options(cxx=str(compiler))


@pytest.mark.parametrize(("who", "reason"), [("fusec", TOO_LARGE), ("the compiler", FULL)])
def test_a_full_disk_is_named_by_its_folder(tmp_path: Path, who: str, reason: str) -> None:
    fails = f"echo 'fatal error: error writing x.s: {FULL}'; exit 1"
    options = Options() if who == "fusec" else compiler_that(tmp_path, fails)
    folder = tempfile.gettempdir()
    said = f"kernels cannot be built in {folder}: {reason}; TMPDIR names another folder"
    full = files_up_to(0) if who == "fusec" else nullcontext()
    with full, pytest.raises(NotWritable, match=re.escape(said)) as raised:
        cpp_kernel.build("int f;", options)
    assert describe_failure(raised.value) == said


def test_a_compiler_that_breaks_down_optimises_less(tmp_path: Path) -> None:
    """As g++ 12.2 does in a loop of running maxima."""
    breaks = "echo 'k.cpp:9: internal compiler error: in compute_live_loop_exits'; exit 1"
    options = compiler_that(tmp_path, f"""case "$*" in *-O1*) exec g++ "$@";; *) {breaks};; esac""")
    assert cpp_kernel.build("int f;", options).startswith(b"\x7fELF")


def said_of_training(options: dict[str, object]) -> list[warnings.WarningMessage]:
    """Return what is said while a graph and its backward are compiled, and run eagerly."""
    torch._dynamo.reset()
    warn_once.cache_clear()
    x = torch.linspace(-1, 1, 7, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        y = torch.compile(lambda x: torch.tanh(x) * 3, backend="fusec", options=options)(x)
        y.sum().backward()
    torch.testing.assert_close(x.grad, 3 * (1 - torch.tanh(x) ** 2))
    return [one for one in said if "fusec" in str(one.message)]


def test_a_compiler_that_fails_on_anything_is_told_once_and_not_bisected(tmp_path: Path) -> None:
    named = compiler_that(tmp_path, "echo 'g++: fatal error: cc1plus is missing'; exit 1").cxx
    (one,) = said_of_training({"cxx": named, "cache": False})
    text = str(one.message)
    assert "cc1plus is missing" in text and named in text and "FUSEC_CXX" in text
    assert "bisect" not in text
    assert one.filename == __file__


@pytest.mark.parametrize("fault", ["no compiler", "full"])
def test_what_the_machine_lacks_is_told_once_at_the_user_s_line(fault: str) -> None:
    with files_up_to(0) if fault == "full" else without_compiler():
        (one,) = said_of_training({"cache": False})
    assert one.filename == __file__
    assert ("C++ compiler found" if fault == "no compiler" else TOO_LARGE) in str(one.message)
    assert "bisect" not in str(one.message)


def test_a_compiler_with_arguments_is_told_to_be_one_path() -> None:
    with pytest.warns(
        UserWarning, match="'c\\+\\+ -O1' does not exist.*one path, without arguments"
    ):
        cpp_kernel.find_compiler("c++ -O1")


def test_a_target_of_another_device_is_for_looking_only() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(torch.tanh, backend="fusec", options={"target": "sm_90"})
    with pytest.warns(UserWarning, match="'sm_90' is for looking at code .* leave it out to run"):
        assert torch.equal(compiled(torch.ones(3)), torch.tanh(torch.ones(3)))


@pytest.mark.parametrize("killed", [1, 2])
def test_a_compiler_that_is_killed_is_tried_again(killed: int, tmp_path: Path) -> None:
    """It has a session of its own: what a terminal's interrupt ends is the Python program."""
    real, compiler = cpp_kernel.find_compiler(None), tmp_path / "g++"
    (tmp_path / "left").write_text("x" * killed)
    compiler.write_text(f"""#!{sys.executable}
import os, pathlib, signal, sys
left = pathlib.Path({str(tmp_path / "left")!r})
if any(argument.endswith(".cpp") for argument in sys.argv) and left.read_text():
    left.write_text(left.read_text()[1:])
    assert os.getsid(0) == os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT if left.read_text() else signal.SIGKILL)
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
""")
    compiler.chmod(0o755)
    build = partial(cpp_kernel.build, "int f;", Options(cxx=str(compiler)))
    if killed == 1:
        assert build().startswith(b"\x7fELF")
    else:
        with pytest.raises(EnvironmentProblem, match="ended from outside"):
            build()
