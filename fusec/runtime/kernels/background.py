"""Work in the background: kernels that another program (a compiler) builds.

Worked example::

    built = Background(work)           # ``work`` runs in a thread
    call = when_ready(lambda: bind(built.result()))
    ...                                # the backward is traced, its passes run
    call(args)                         # waits for ``work``, binds, and runs
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from fusec.runtime.calls.executable import BoxedCall

T = TypeVar("T")
_running: set[Background[Any]] = set()


class Background(Generic[T]):
    """A result that is computed in a thread.

    The interpreter waits for the thread before it exits. A fork waits for it, too, because the
    child has the result but no threads; and for first calls that have begun in other threads.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="fusec-build", daemon=False
        )  # joined at exit, even if a daemon thread starts it
        _running.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # no new threads: the interpreter shuts down
            self._run(work)

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # raised by ``result``, in its caller's thread
            self._future.set_exception(error)
        finally:
            _running.discard(self)

    def result(self) -> T:
        """Wait for the result and return it.

        Raises:
            Exception: the error that its computation raised.
        """
        return self._future.result()

    def wait(self) -> None:
        """Wait until the work has ended, with a result or an error."""
        if self._thread.ident is not None:  # else it could not start
            self._thread.join()


def wait_for_all() -> None:
    """Wait for all work in the background."""
    for background in tuple(_running):
        background.wait()


_binding = threading.RLock()
"""Held while a first call binds, and across a fork. A child has no other threads: what they left
half done, or locked, would stay so."""


def _settle() -> None:
    _binding.acquire()
    wait_for_all()


os.register_at_fork(
    before=_settle, after_in_parent=_binding.release, after_in_child=_binding.release
)


def when_ready(bind: Callable[[], BoxedCall]) -> BoxedCall:
    """Return a boxed callable whose first call gets from ``bind`` the one that all calls run."""
    waiting = [bind]
    bound: BoxedCall | None = None

    def boxed(args: list[Any]) -> Any:
        nonlocal bound
        if bound is None:
            with _binding:
                if bound is None:
                    bound = waiting[0]()
                    waiting.clear()  # frees what it holds, such as the library's bytes
        return bound(args)

    return boxed
