"""Run a user's script as ``python script.py`` would, but compile its models by fusec.

``torch.compile`` without a backend means Inductor; here it means fusec. Options and modes that
fusec does not have are left out. With ``every``, a model that the script calls without compiling it
is compiled at its first call: the outermost module of a call, for its parts are in its graph.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from fusec.backend import fusec
from fusec.options import Options

FAILED = 3
"""The exit code of a script that raised."""
INTERRUPTED = 130
"""The exit code of a script that the user ended: that of the shell for SIGINT."""
_DEFAULT = "inductor"


@dataclass(frozen=True, slots=True)
class Ran:
    """How a script ended.

    Attributes:
        code: its exit code.
        raised: an exception ended it, so that its code is FAILED.
        taken: how many compiles fusec took from another backend.
    """

    code: int
    raised: bool
    taken: int


def run_script(path: Path, arguments: Sequence[str], *, every: bool, backend: Any = "fusec") -> Ran:
    """Run a script; an exception or interrupt that ends it is printed as Python does.

    Args:
        every: compile also the models that it does not compile.
        backend: in the place of fusec.
    """
    taken = _Taken(backend)
    file = os.path.abspath(path)  # absolute, as Python's __file__: the script may change directory
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", file)
    vars(main).update(__file__=file, __loader__=loader, __builtins__=builtins, __cached__=None)
    main.__package__, root = _package_of(Path(os.path.realpath(path)))
    before = set(threading.enumerate())
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(
            sys, "path", [os.path.dirname(os.path.realpath(path)), *sys.path[1:], *root]
        ),
        mock.patch.object(torch, "compile", taken.compile),
        _main_module(main),
        _compiling_all() if every else _nothing(),
    ):
        code, raised = _run(main, file)
        _join(before)
        return Ran(code, raised, taken.count)


def _package_of(path: Path) -> tuple[str | None, list[str]]:
    """Return the package that a script is in, and the folder of that, for relative imports.

    They work as under ``python -m package.script``.
    """
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    return (".".join(names), [str(folder)]) if names else (None, [])


def _run(main: ModuleType, file: str) -> tuple[int, bool]:
    """Return a script's exit code, and whether it raised."""
    try:
        with io.open_code(file) as source:
            program = compile(source.read(), file, "exec", dont_inherit=True)
        exec(program, vars(main))
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        return code, False
    except (Exception, KeyboardInterrupt) as error:
        _print_as_python(error, file)
        raised = isinstance(error, Exception)
        return FAILED if raised else INTERRUPTED, raised
    return 0, False


def _print_as_python(error: BaseException, file: str) -> None:
    """Print a traceback that begins in the script; there is none for a syntax error in it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != file:
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _join(before: set[threading.Thread]) -> None:
    """Wait for the script's threads, as Python does at its end."""
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join()


@contextmanager
def _main_module(main: ModuleType) -> Iterator[None]:
    """Make a module ``__main__`` in a block, as pickle and multiprocessing look there."""
    own = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.modules["__main__"] = own


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Taken:
    """``torch.compile`` whose default backend is fusec; counts what it took from Inductor."""

    def __init__(self, backend: Any) -> None:
        self.original = torch.compile
        self.backend = backend
        self.count = 0

    def compile(self, model: Any = None, **settings: Any) -> Any:
        """Compile by fusec if no backend is named; ``settings`` are those of ``torch.compile``."""
        asked = settings.get("backend", _DEFAULT)
        if asked == _DEFAULT:
            self.count += 1
            settings["options"] = _known(settings.get("options"))
        if asked in (_DEFAULT, "fusec", fusec):
            settings["backend"] = self.backend
        return self.original(model, **settings)


def _known(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the options that fusec has, too, or None if there are none."""
    names = Options.__dataclass_fields__
    return {name: value for name, value in (options or {}).items() if name in names} or None


@contextmanager
def _compiling_all() -> Iterator[None]:
    """Compile each module that is called from outside of any other, at its first call."""
    local = threading.local()
    original: Callable[..., Any] = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(local, "inside", False):
            return original(self, *args, **kwargs)
        if self._compiled_call_impl is None and not _is_compiled(self):
            self.compile(backend="fusec")
        local.inside = True
        try:
            return original(self, *args, **kwargs)
        finally:
            local.inside = False

    with mock.patch.object(nn.Module, "__call__", call):
        yield


def _is_compiled(module: nn.Module) -> bool:
    """Return True for a result of ``torch.compile``, or a module without parameters (a loss)."""
    return hasattr(module, "_orig_mod") or next(module.parameters(), None) is None
