"""Run a user's script as ``python script.py`` would, but compile its models by fusec.

``torch.compile`` without a backend means Inductor; here it means fusec. Options and modes that
fusec does not have are left out. With ``every``, a model that the script calls without compiling it
is compiled at its first call: the outermost module of a call, for its parts are in its graph.

Small graphs are timed once, compiled and eagerly (``Beside``): a call of some hundred microseconds
may cost more compiled than eagerly, where the overhead of launches decides. A graph's third call,
where the program has also run its backward, is repeated on copies of its arguments, compiled and
eagerly in turn, without an effect on the clock, the random generator and the program's tensors. Not
repeated are graphs with side effects on anything but their arguments. Guards cost what modules do,
so neither is in these times.
"""

from __future__ import annotations

import builtins
import copy
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from fusec.backend import fusec
from fusec.frontend.fx_passes.dynamo_graph import copied
from fusec.options import Options
from fusec.tools.clock import Clock, differentiated, time_in_turn
from fusec.torch_interior import HigherOrderOperator, compile_id, tensors_in

# -- small graphs beside eager ---------------------------------------------------------------------


SMALL_US = 3000.0
"""In a longer call, the overhead of launches does not decide."""
_CALL, _ROUNDS = 3, 12
_MOST_BYTES = 1 << 24
_LOSES_BY, _LEAST_US = 1.1, 5.0
_PLAIN = ("aten", "prims", "prim")


@dataclass(frozen=True, slots=True)
class Compared:
    """Microseconds of a call, with its backward where the program trains, compiled and eagerly.

    Attributes:
        compile: Dynamo's number of the graph, "0/1".
    """

    compile: str
    fusec_us: float
    eager_us: float

    @property
    def loses(self) -> bool:
        """Whether eager is faster, by more than noise."""
        lost = self.fusec_us - self.eager_us
        return self.fusec_us > _LOSES_BY * self.eager_us and lost > _LEAST_US


@dataclass(slots=True)
class Beside:
    """The backend of a run, and its comparisons.

    Attributes:
        seconds: that comparing took.
    """

    clock: Clock
    compared: list[Compared] = field(default_factory=list)
    seconds: float = 0.0

    def backend(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile a graph of Dynamo as ``fusec.backend.fusec`` does."""
        eager, number = copied(gm), compile_id()
        compiled = fusec(gm, example_inputs, mode=mode, options=options)
        if not _acts_on_nothing(eager):
            return compiled
        watched = _Watched(self, compiled, eager, number)
        return lambda *args: watched.call(*args)  # a function: Dynamo may set attributes on it

    def compare(self, compiled: Any, eager: Any, number: str, args: Sequence[Any]) -> None:
        """Time a call compiled and eagerly, on copies; skip a call that fails."""
        start, state = time.perf_counter(), torch.get_rng_state()
        with suppress(Exception), self.clock.apart() as launches:
            calls = [differentiated(fn, _copies(args)) for fn in (compiled, eager)]
            ours, theirs = time_in_turn(calls, _ROUNDS)
            each = launches() / (_ROUNDS + 2) * self.clock.cost_us()
            self.compared.append(Compared(number, max(ours - each, 0.0), theirs))
        torch.set_rng_state(state)
        self.seconds += time.perf_counter() - start


@dataclass(slots=True)
class _Watched:
    """A compiled graph, of which one call is repeated."""

    beside: Beside
    compiled: Callable[..., Any]
    eager: fx.GraphModule
    number: str
    calls: int = 0

    def call(self, *args: Any) -> Any:
        """Call the graph; one of its calls is also compared."""
        start = time.perf_counter()
        made = self.compiled(*args)
        if self.calls < 0:
            return made
        self.calls += 1
        if self.calls >= _CALL:
            spent = (time.perf_counter() - start) * 1e6
            if spent > SMALL_US or not _are_few(args):
                self.calls = -1
            elif not _trains(made) or self.beside.clock.totals(f"backward {self.number}"):
                self.calls = -1
                self.beside.compare(self.compiled, self.eager, self.number, args)
        return made


def _acts_on_nothing(gm: fx.GraphModule) -> bool:
    """Return True if a graph has no side effects except on its arguments."""

    def is_plain(target: Any) -> bool:
        namespace = getattr(target, "namespace", None) or _namespace(target)
        return not isinstance(target, HigherOrderOperator) and namespace in (None, *_PLAIN)

    kinds = {node.op for node in gm.graph.nodes}
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    return "call_module" not in kinds and all(map(is_plain, targets))


def _namespace(target: Any) -> str | None:
    """Return the namespace of an operator's packet; None for a function of torch's."""
    name = getattr(target, "_qualified_op_name", "")
    return name.partition("::")[0] or None


def _are_few(args: Sequence[Any]) -> bool:
    """Return True for plain tensors on a CPU that are cheap to copy."""
    tensors = tensors_in(args)
    plain = all(type(t) in _TYPES and t.device.type == "cpu" and not t.is_conj() for t in tensors)
    return plain and sum(t.untyped_storage().nbytes() for t in tensors) <= _MOST_BYTES


_TYPES = (torch.Tensor, torch.nn.Parameter)


def _trains(made: Any) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(made))


def _copies(args: Sequence[Any]) -> list[Any]:
    """Return arguments in other memory, with the same strides, offsets and sharing."""
    known: dict[int, Any] = {}  # deepcopy clones each memory once
    return [
        copy.deepcopy(one.detach(), known).requires_grad_(one.requires_grad)
        if isinstance(one, torch.Tensor)
        else one
        for one in args
    ]


# -- scripts ---------------------------------------------------------------------------------------


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

    What a script changes of ``sys`` is put back.

    Args:
        every: compile also the models that it does not compile.
        backend: in the place of fusec.
    """
    taken = _Taken(backend)
    file = os.path.abspath(path)  # absolute, as Python's __file__: the script may change directory
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", file)
    vars(main).update(__file__=file, __loader__=loader, __builtins__=builtins, __cached__=None)
    package, folder = package_of(path)
    main.__package__, root = package or None, [str(folder)] if package else []
    before = set(threading.enumerate())
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(
            sys, "path", [os.path.dirname(os.path.realpath(path)), *sys.path[1:], *root]
        ),
        mock.patch.object(sys, "stdout", sys.stdout),
        mock.patch.object(torch, "compile", taken.compile),
        _main_module(main),
        _compiling_all() if every else nullcontext(),
    ):
        code, raised = _run(main, file)
        _join(before)
        with suppress(AttributeError, ValueError):  # None, closed, or an object of the script's
            sys.stdout.flush()
        return Ran(code, raised, taken.count)


def package_of(path: Path) -> tuple[str, Path]:
    """Return the package that a file is in, "" for none, and the folder of that.

    Relative imports need them, which work as under ``python -m package.script``.
    """
    names: list[str] = []
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names), folder


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
