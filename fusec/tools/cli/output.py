"""Output of the command line: results to stdout, progress to stderr, colour for a terminal."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from pathlib import Path

from fusec.errors import LOUD, EnvironmentProblem, NotWritable, UsageError
from fusec.tools.terminal import Report

_quiet = ContextVar("quiet", default=False)


def progress(message: str) -> None:
    """Print a progress message to stderr, unless ``--quiet`` was given."""
    if not _quiet.get():
        print(f"fusec: {message}", file=sys.stderr, flush=True)


@contextmanager
def said(quiet: bool) -> Iterator[None]:
    """Print progress messages in a block unless ``quiet``."""
    token = _quiet.set(quiet)
    try:
        yield
    finally:
        _quiet.reset(token)


def hush(quiet: bool) -> None:
    """Stop progress messages, for a ``--quiet`` that is parsed late, after a TARGET."""
    if quiet:
        _quiet.set(True)


def show(text: str, language: str = "text") -> None:
    """Print a result; on a terminal in colour, where rich is installed and NO_COLOR is not set.

    Args:
        language: of the text: "python", "cpp", "text".
    Raises:
        EnvironmentProblem: if stdout is closed or full.
        BrokenPipeError: if its reader went away.
    """
    if sys.stdout is None or sys.stdout.closed:
        raise EnvironmentProblem("standard output is closed, so there is no place for results")
    try:
        if not (sys.stdout.isatty() and _show_in_colour(text, language)):
            sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        write_nowhere()
        raise EnvironmentProblem(f"results cannot be written to standard output: {error}") from None


def show_report(report: Report, *, json: bool, whole: bool = False) -> None:
    """Print a report, as text or in its JSON form."""
    show(report.to_json() if json else report.text(whole=whole))


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Raise NotWritable for an error of the file system in a block, which writes ``what``."""
    try:
        yield
    except OSError as error:
        raise NotWritable(f"cannot write {what}: {error.strerror or error}") from error


def check_writable(path: Path) -> None:
    """Raise an error for a file that cannot be written; leave no new file behind.

    Raises:
        UsageError: if there is no directory for it.
        NotWritable: otherwise.
    """
    if not path.resolve().parent.is_dir():
        raise UsageError(f"there is no directory for {str(path)!r}.")
    there = path.exists()
    if there and not (path.is_file() or path.is_dir()):  # a pipe, such as /dev/stdout
        return
    with writing(path):
        with path.open("ab"):
            pass
        if not there:
            path.unlink()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file.

    Raises:
        NotWritable: if that fails.
    """
    with writing(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file that takes a path's place when the block ends: who reads that keeps it whole.

    Raises:
        NotWritable: if that fails.
    """
    target = path.resolve()
    made = target.with_name(f".{target.name}.{os.getpid()}")
    with writing(path):
        if path.exists() and not path.is_file():  # a pipe
            yield path
            return
        try:
            yield made
            made.replace(target)
        finally:
            made.unlink(missing_ok=True)


@contextmanager
def user_code(arguments: argparse.Namespace) -> Iterator[None]:
    """Run user code in a block: it prints to stderr, and torch is quiet without --traceback."""
    with redirect_stdout(sys.stderr), nullcontext() if arguments.traceback else quiet_torch():
        yield


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Silence torch's loggers in a block unless TORCH_LOGS is set.

    Dynamo logs an error of the model's twice, in 200 lines before fusec's own message.
    """
    loggers = [] if os.environ.get("TORCH_LOGS") else list(map(logging.getLogger, LOUD))
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def write_nowhere() -> None:
    """Redirect stdout to the null device, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_in_colour(text: str, language: str) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    try:
        # An optional dependency: without it, text is plain.
        from rich.console import Console
        from rich.syntax import Syntax
    except ImportError:
        return False
    console = Console(highlight=False, soft_wrap=True)
    if language == "text":
        lines = text.splitlines()
        for line, below in zip(lines, [*lines[1:], ""], strict=True):
            console.print(line, style=_style(line, below), markup=False)
    else:
        console.print(Syntax(text, language, background_color="default"))
    return True


def _style(line: str, below: str) -> str:
    """Return how a line of a report looks: headings bold, lines of the user's code dim.

    Args:
        below: the next line; an indented line is a heading if the next is indented more.
    """
    if _SOURCE.match(line):
        return "dim"
    depth = _indent(line)
    heading = depth == 0 or (depth < 3 and _indent(below) > depth)
    return "bold" if heading and "  " not in line.strip() else ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


_SOURCE = re.compile(r" {6,}\S+:\d+ in [^:]+(: |$)")
