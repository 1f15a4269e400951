"""Runs a file in a process of its own, which may crash, hang or end as it likes.

Processes are forked from a server that has imported torch and fusec, so that one begins in
milliseconds. What a file does is an ``Outcome``: two of them are the same fault if they are of one
kind and, for exceptions, of one type in one stage.
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
    "fusec.driver.backend", "fusec.tools.bisect.trial",
)  # fmt: skip
"""What the server imports: what a compile does."""
_FILE = "<bisect>"
"""What the file is called in tracebacks."""
_LINES = 400
"""Characters of an error that an outcome keeps."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What running a file came to.

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
        """Return True for the same fault, as far as this can tell."""
        return (self.kind, self.cause, self.stage) == (fault.kind, fault.cause, fault.stage)


@functools.cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def run_apart(work: Callable[..., Any], *args: Any, seconds: float | None = SECONDS) -> Any:
    """Return what a function returns in a process of its own.

    Args:
        work: a function of a module, which can be pickled, as its arguments and result can.
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
    """A process ended without an answer: HANGS, or the signal's name."""

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
    with contextlib.suppress(ImportError):  # whose lock between processes a signal would leave
        importlib.import_module("tqdm").tqdm.set_lock(threading.RLock())
    if not os.environ.get("TORCH_LOGS"):
        for name in LOUD:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        answer = work(*args)
    except FusecError as error:
        answer = _Failed(error)
    except Exception as error:  # which may not be one that can be pickled
        answer = _Failed(RuntimeError(f"{type(error).__name__}: {error}"))
    answers.send(answer)
    answers.close()


Apart = Callable[..., Any]
"""``run_apart``, or what stands in its place."""


# -- files -----------------------------------------------------------------------------------------


def try_file(text: str, apart: Apart = run_apart, file: str = _FILE) -> Outcome:
    """Return what running a file's text comes to, in a process of its own.

    Args:
        file: what the text takes for its own path.
    """
    try:
        outcome: Outcome = apart(run_here, text, file)
        return outcome
    except Died as death:
        return Outcome(HANGS if death.how == HANGS else CRASH, death.how)


def run_here(text: str, file: str = _FILE) -> Outcome:
    """Return what running a file's text comes to, in this process."""
    with silent():
        try:
            exec(compile(text, _FILE, "exec"), {"__name__": "__main__", "__file__": file})
        except SystemExit as ended:
            return Outcome(SLOWER if ended.code else AGREES)
        except Exception as error:
            return outcome_of(error)
    return Outcome(AGREES)


def outcome_of(error: Exception) -> Outcome:
    """Return what an exception is: a difference, a fault of fusec's, or none of these."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    frames = frames[frames.index(_FILE) :] if _FILE in frames else frames
    inner = getattr(error, "inner_exception", None) or error
    said = str(inner).strip()[:_LINES]
    if frames[-1].endswith(os.path.join("testing", "_comparison.py")):
        lines = [line for line in said.splitlines() if line]
        return Outcome(WRONG, said="; ".join(lines[1:3]))  # how many, and where the most
    stage = stage_of(inner)
    if not stage and "<fusec wrapper>" in frames:
        stage = LAUNCH
    inside = stage or any(_OWN in f for f in frames) or hasattr(error, "inner_exception")
    if not inside:
        return Outcome(INVALID, type(inner).__name__, said=said)
    return Outcome(CRASH, type(inner).__name__, stage, said)


LAUNCH = "launch"
"""The stage of what fails while a compiled graph runs."""
_OWN = os.sep + os.path.join("fusec", "")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Let what is printed go nowhere: thousands of lines of tracebacks that nobody reads."""
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
