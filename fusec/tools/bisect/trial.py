"""Run a file in a separate process, which may crash, hang or exit.

Processes are forked from a server that has imported torch and fusec, so that one begins in
milliseconds. The result is an ``Outcome``: two of them are the same fault if they agree in kind
and, for exceptions, in type and stage.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from fusec.errors import LOUD, FusecError, stage_of
from fusec.tools.bisect.source import CRASH, SLOWER, WRONG

AGREES, INVALID, HANGS = "agrees", "invalid", "hangs"
SECONDS = 60.0
"""How long a file may run."""
_PRELOADED = (
    "torch", "torch._dynamo.convert_frame", "torch._dynamo.variables", "torch._dynamo.eval_frame",
    "torch._functorch.aot_autograd", "torch._inductor.utils",
    "fusec.backend", "fusec.tools.bisect.trial",
)  # fmt: skip
"""The modules that a compile imports, preloaded by the server."""
_FILE = "<bisect>"
"""The file's name in tracebacks."""
_LINES = 400
"""Characters of an error that an outcome keeps."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of running a file.

    Attributes:
        kind: AGREES, INVALID (eager fails, too), HANGS, or a fault's: WRONG, CRASH, SLOWER.
        cause: of a crash, the exception's type or the signal's name.
        stage: of a crash, where known.
        said: the error's text.
    """

    kind: str
    cause: str = ""
    stage: str = ""
    said: str = ""

    def shows(self, fault: Outcome) -> bool:
        """Return True if kind, cause and stage equal those of a fault."""
        return (self.kind, self.cause, self.stage) == (fault.kind, fault.cause, fault.stage)


@functools.cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def run_apart(work: Callable[..., Any], *args: Any, seconds: float | None = SECONDS) -> Any:
    """Call a function in a separate process and return its result.

    Args:
        work: a function that can be pickled, as can its arguments and its result.
    Raises:
        Died: if the process ended otherwise, by a signal say, or took too long.
        FusecError: which the function raised.
        RuntimeError: for any other exception.
    """
    ours, theirs = _server().Pipe(duplex=False)
    process = _server().Process(target=_child, args=(theirs, work, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            process.kill()
            process.join()
            raise Died(HANGS)
        answer = ours.recv()
    except EOFError:
        process.join()
        raise Died(_death(process.exitcode)) from None
    process.join(seconds)
    if isinstance(answer, _Failed):
        raise answer.error
    return answer


class Died(Exception):
    """A process ended without a result: HANGS, or the signal's name."""

    @property
    def how(self) -> str:
        """HANGS, the name of the signal, or "exit N"."""
        return str(self.args[0])


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit {code}"
    return signal.Signals(-code).name


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


def _child(answers: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with contextlib.suppress(ImportError):  # a signal would leave its lock behind
        importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    if not os.environ.get("TORCH_LOGS"):
        for name in LOUD:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        answer = work(*args)
    except FusecError as error:
        answer = _Failed(error)
    except Exception as error:  # it may be one that cannot be pickled
        answer = _Failed(RuntimeError(f"{type(error).__name__}: {error}"))
    answers.send(answer)
    answers.close()


Apart = Callable[..., Any]
"""``run_apart``, or a replacement."""


# -- files -----------------------------------------------------------------------------------------


def try_file(text: str, apart: Apart = run_apart, file: str = _FILE) -> Outcome:
    """Run a file's text in a separate process and return its outcome.

    Args:
        file: the path that the program has as its own (``__file__``).
    """
    try:
        outcome: Outcome = apart(run_here, text, file)
        return outcome
    except Died as death:
        return Outcome(HANGS if death.how == HANGS else CRASH, death.how)


def run_here(text: str, file: str = _FILE) -> Outcome:
    """Run a file's text in this process and return its outcome."""
    with silent():
        try:
            exec(compile(text, _FILE, "exec"), {"__name__": "__main__", "__file__": file})
        except SystemExit as ended:
            return Outcome(SLOWER if ended.code else AGREES)
        except Exception as error:
            return outcome_of(error)
    return Outcome(AGREES)


def outcome_of(error: Exception) -> Outcome:
    """Classify an exception: a difference, a crash of fusec's, or an invalid program."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    frames = frames[frames.index(_FILE) :] if _FILE in frames else frames
    inner = getattr(error, "inner_exception", None) or error
    said = str(inner).strip()[:_LINES]
    if frames[-1].endswith(os.path.join("testing", "_comparison.py")):
        lines = [line for line in said.splitlines() if line]
        return Outcome(WRONG, said="; ".join(lines[1:3]))  # how many differ, and where the most
    stage = stage_of(inner)
    if not stage and "<fusec wrapper>" in frames:
        stage = LAUNCH
    inside = stage or any(_OWN in f for f in frames) or hasattr(error, "inner_exception")
    if not inside:
        return Outcome(INVALID, type(inner).__name__, said=said)
    return Outcome(CRASH, type(inner).__name__, stage, said)


LAUNCH = "launch"
"""The stage of a failure while a compiled graph runs."""
_OWN = os.sep + os.path.join("fusec", "")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Discard what is printed: trials print thousands of lines of tracebacks."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    saved = [os.dup(1), os.dup(2)]
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        for number, own in enumerate(saved, 1):
            os.dup2(own, number)
            os.close(own)
        os.close(nowhere)
