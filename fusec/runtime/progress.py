"""One line of the terminal for what takes long: what a compile is at, what a race tries.

It is written over again and again and is empty in the end. In a pipe or a file there is none, and
none of a compile that ends within ``PATIENCE_S``. Where graphs are compiled inside a compile, the
outermost one's line says what is done.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 2.0
"""A compile that takes less shows nothing; a line that is shown is renewed so often."""

_lock = threading.Lock()
_open: list[_Line] = []
_racing = 0


@contextlib.contextmanager
def long_compile(name: str) -> Iterator[None]:
    """Show on a terminal what the compile of a graph is at, once it takes long."""
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
    """Say what the compile that runs is at, if one shows it."""
    with _lock:
        if _open:
            _open[0].said = text


@contextlib.contextmanager
def race_line() -> Iterator[Callable[[str], None]]:
    """Yield what shows each step of a race; a compile's own line waits for its end."""
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
    """What a compile is at; ``run`` shows it until ``done``."""

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
