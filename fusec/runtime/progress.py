"""Show the progress of long compiles and races in one line of the terminal.

The line is overwritten in place and cleared at the end. Nothing is shown if stderr is no terminal,
or for a compile that ends within ``PATIENCE_S``. Nested compiles show the line of the outermost
one.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 2.0
"""Seconds before a compile shows its line, and between updates of it."""

_lock = threading.Lock()
_open: list[_Line] = []
_racing = 0


@contextlib.contextmanager
def long_compile(name: str) -> Iterator[None]:
    """Show the progress of a graph's compile on a terminal, once it takes long."""
    if not _is_terminal():
        yield
        return
    line = _Line(name)
    with _lock:
        _open.append(line)
    thread = threading.Thread(target=line.run, name="fusec-progress", daemon=True)
    if line is _open[0]:
        thread.start()
    try:
        yield
    finally:
        line.done.set()
        with _lock:
            _open.remove(line)
        if thread.ident is not None:
            thread.join()


def say(text: str) -> None:
    """Set what the compile's line shows as its current step."""
    with _lock:
        if _open:
            _open[0].said = text


@contextlib.contextmanager
def race_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the step of a race; the compile's own line pauses meanwhile."""
    global _racing
    if not _is_terminal():
        yield lambda message: None
        return
    with _lock:
        _racing += 1
    try:
        yield lambda message: _write(f"fusec: race: {message}")
    finally:
        with _lock:
            _racing -= 1
        _clear()


class _Line:
    """The progress of a compile; ``run`` shows it until ``done`` is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.said = ""
        self.done = threading.Event()
        self.since = time.perf_counter()

    def run(self) -> None:
        shown = False
        while not self.done.wait(PATIENCE_S):
            if not _racing:
                spent = time.perf_counter() - self.since
                _write(f"fusec: compiling {self.name}: {self.said} ({spent:.0f} s)")
                shown = True
        if shown:
            _clear()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _write(text: str) -> None:
    width = max(shutil.get_terminal_size().columns - 1, 1)
    print(f"\r{text[:width]:<{width}}", end="", file=sys.stderr, flush=True)


def _clear() -> None:
    _write("")
    print("\r", end="", file=sys.stderr, flush=True)
