"""Watch the calls of functions, by whatever name they are called, while they do what they do.

Worked example::

    with calls_of(fuse) as calls:
        compiled(x)
    assert [call.result for call in calls] == [schedule]
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FrameType, FunctionType
from typing import Any

Note = Callable[[], Any] | None


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
def calls_of(*functions: Callable[..., Any], note: Note = None) -> Iterator[list[Call]]:
    """Yield the calls of functions that begin in this block, in order and from each thread.

    Of a function written in C neither arguments nor results are known, nor calls by other threads.
    """
    found: list[Call] = []
    with ExitStack() as watches:
        for function in functions:
            plain = _without_decorators(function)
            if isinstance(plain, BuiltinFunctionType):
                watches.enter_context(_profiled(plain, found))
            else:
                watches.enter_context(_watched(plain, found, note))
        yield found


def _without_decorators(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return getattr(function, "__func__", function)


@contextmanager
def _watched(function: FunctionType, found: list[Call], note: Note) -> Iterator[None]:
    """Give a function code that notes each call and then runs its own.

    To profile would be to be called for each call of the process: a compile takes three times as
    long. The function itself stays, so that each of its callers comes by.
    """
    code, defaults, named = function.__code__, function.__defaults__, function.__kwdefaults__
    own = FunctionType(code, function.__globals__, code.co_name, defaults, function.__closure__)
    own.__kwdefaults__ = named
    signature = inspect.Signature.from_callable(own)

    def noted(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        call = Call(code.co_name, dict(given.arguments))
        call.noted = note() if note is not None else None
        found.append(call)
        call.result = own(*args, **kwargs)
        return call.result

    # It closes over as many variables as the function's own code, which it does not read.
    function.__code__ = _calling.__code__.replace(
        co_name=code.co_name, co_freevars=code.co_freevars
    )
    function.__defaults__, function.__kwdefaults__ = None, {"_noted": noted}
    try:
        yield
    finally:
        function.__code__ = code
        function.__defaults__, function.__kwdefaults__ = defaults, named


def _calling(*args: Any, _noted: Callable[..., Any], **kwargs: Any) -> Any:
    return _noted(*args, **kwargs)


@contextmanager
def _profiled(function: BuiltinFunctionType, found: list[Call]) -> Iterator[None]:
    before = sys.getprofile()

    def watch(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called is function:
            found.append(Call(function.__name__, {}))

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
