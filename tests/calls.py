"""Watch the calls of functions as the interpreter makes them: nothing is put in their place.

Worked example::

    with calls_of(fuse) as calls:
        compiled(x)
    assert [call.result for call in calls] == [schedule]
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(slots=True)
class Call:
    """One call.

    Attributes:
        arguments: by the names of the function's parameters.
        noted: what `note` returned when it began.
        result: what it returned; None until then, and where it raised.
    """

    function: str
    arguments: dict[str, Any]
    noted: Any = None
    result: Any = None


@contextmanager
def calls_of(
    *functions: Callable[..., Any], note: Callable[[], Any] | None = None
) -> Iterator[list[Call]]:
    """Yield the calls of functions that begin in this block, in order.

    Calls in threads that begin in this block are among them. Of a function written in C neither
    arguments nor results are known.
    """
    watched = {id(_code_of(function)) for function in functions}
    found: list[Call] = []
    running: dict[FrameType, Call] = {}
    before = sys.getprofile()

    def watch(frame: FrameType, event: str, result: Any) -> None:
        if before is not None:
            before(frame, event, result)
        if id(result if event == "c_call" else frame.f_code) not in watched:
            return
        if event == "c_call":
            found.append(Call(result.__name__, {}))
        elif event == "call":
            call = Call(frame.f_code.co_name, dict(frame.f_locals))
            call.noted = note() if note is not None else None
            found.append(call)
            running[frame] = call
        elif event == "return" and frame in running:
            running.pop(frame).result = result

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


def _code_of(function: Callable[..., Any]) -> Any:
    """Return what the interpreter names for a call: a function's code, or itself if it is of C."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__code__", function)
