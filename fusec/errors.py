"""The error catalogue: every exception that fusec raises on purpose.

Families of errors, by who can do something about them:

    Unsupported                      nobody has to: the operation runs as an eager kernel
    UsageError                       the caller: a bad option, mode, target, input spec or stage
    ModelError                       the caller: the model fails by itself, without fusec
    PassError                        the caller: a pass of theirs raises, or returns something wrong
    BuildError, EnvironmentProblem   the machine: a compiler failed, a tool or device is missing
    InvalidIR, InternalError         fusec: a verifier or an invariant failed, a defect of its own
    WrongKernel                      fusec: a kernel's results are off, found by the option verify
    WrongGraph                       fusec: a graph's results are off though its kernels are not
    ContractBroken                   the caller: a model compiles to other than `fusec.expect` asks
    KernelFault                      fusec: a candidate of a race crashed or hung, and is dropped

A message says what was seen, where, and what to do next. Each class carries the exit code that the
command line ends with; 0 is success and 1 a failed check, which only in a test is an exception.

Exceptions cross process boundaries (kernels are built in parallel), so each can be pickled: what
`__init__` needs by position is in `args`, the rest is an ordinary attribute.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from typing import ClassVar

BUILD_OUTPUT_LINES = 20
"""How much of a failed compiler's output a message shows; the whole text is `BuildError.output`."""

LOUD = ("torch._dynamo", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""Loggers of torch that print the tracebacks of errors which are handled and reported."""
_LIBRARIES = re.compile(r"[/\\](torch|importlib)[/\\]|[/\\]contextlib\.py$|^<")
_HERE = os.path.dirname(os.path.abspath(__file__))


class FusecError(Exception):
    """Base of all errors that fusec raises on purpose."""

    exit_code: ClassVar[int] = 3


class Unsupported(FusecError):
    """fusec has no lowering for this operation; it becomes an `Extern` and the compile goes on.

    Args:
        reason: why, in a few words that read well after the operation's name in `fusec explain`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UsageError(FusecError):
    """The caller asked for something that does not exist; the message says what does."""

    exit_code: ClassVar[int] = 2

    @classmethod
    def unknown(cls, kind: str, seen: str, valid: Iterable[str]) -> UsageError:
        """Return the error for a name outside a closed set, naming the nearest member and the set.

        Args:
            kind: what was named, in the singular: "mode", "option", "stage".
        """
        names = list(valid)
        near = nearest(seen, names)
        hint = f" Did you mean {near!r}?" if near is not None else ""
        return cls(f"unknown {kind} {seen!r}.{hint} Valid: {', '.join(names)}.")


class ModelError(FusecError):
    """The model fails by itself, called eagerly with the same inputs; made by ``raised``.

    Args:
        described: what it raised, and where.
    """

    @classmethod
    def raised(cls, error: BaseException) -> ModelError:
        """Return the error for what the user's code raised, with the last line of that code."""
        described = f"{type(error).__name__}: {error}"
        where = describe_frame(error)
        return cls(f"{described}\n  at {where}" if where else described)

    def __str__(self) -> str:
        return f"the model itself fails, without fusec:\n{self.args[0]}"


class PassError(FusecError):
    """A pass of the user's (`fusec.register_pass`) raised, or returned what no pass may return.

    Args:
        name: the pass's.
        seen: what it did, as "returned None".
    """

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        name, seen = self.args
        return (
            f"the pass {name!r} {seen}.\nIt is no stage of fusec's own: "
            "`fusec dump TARGET --stage graph` prints what it was given."
        )


def describe_frame(error: BaseException) -> str:
    """Return the last line of the user's code that an exception passed, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    if not own:
        return ""
    line = f": {own[-1].line}" if own[-1].line else ""
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}{line}"


class ContractBroken(FusecError, AssertionError):
    """A model compiles to something else than ``fusec.expect`` asks for: a test that fails."""

    exit_code: ClassVar[int] = 1


def warn_user(message: str) -> None:
    """Warn at the line of the user's code that is running now, or here if there is none."""
    frame = sys._getframe(1)
    running = frame
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    at = running if frame is None else frame
    warnings.warn_explicit(
        message,
        UserWarning,
        at.f_code.co_filename,
        at.f_lineno,
        registry=at.f_globals.setdefault("__warningregistry__", {}),
    )


@functools.cache
def warn_once(message: str) -> None:
    """Warn as ``warn_user`` does, once a process for each message."""
    warn_user(message)


def _is_users(filename: str) -> bool:
    return not (_LIBRARIES.search(filename) or filename.startswith(_HERE))


class IndexOutOfRange(IndexError, RuntimeError):
    """A gather beyond its tensor: eager raises the one or the other, by operation.

    It takes the place of an error of eager, so it is no `FusecError`.
    """


class EnvironmentProblem(FusecError):
    """The machine lacks something: a compiler, a device, a writable directory, a package."""

    exit_code: ClassVar[int] = 4


class OutOfMemory(EnvironmentProblem):
    """A device's memory is full."""


class NotWritable(EnvironmentProblem):
    """A file or directory that the caller named cannot be written."""


class BuildError(FusecError):
    """A compiler (C++, Triton, ptxas) rejected what fusec emitted, or died.

    Args:
        command: the command line, by argument.
        output: everything the compiler printed.
        returncode: its exit status; negative for a signal.
    """

    def __init__(self, command: Sequence[str], output: str, returncode: int = 1) -> None:
        super().__init__(tuple(command), output, returncode)
        self.command = tuple(command)
        self.output = output
        self.returncode = returncode

    def __str__(self) -> str:
        lines = self.output.strip().splitlines() or ["(it printed nothing)"]
        tail = "\n  ".join(lines[-BUILD_OUTPUT_LINES:])
        return (
            f"build failed with exit status {self.returncode}: {shlex.join(self.command)}\n"
            f"  {tail}\n"
            "Run `fusec doctor` to check the compiler; if it is sound, the source is at fault."
        )


class StageError(FusecError):
    """A defect of fusec, with the stage in which it showed.

    The raiser often does not know its stage, so the runner of the stages fills in `stage` with
    `in_stage` as the error propagates.
    """

    blame: ClassVar[str]
    advice: ClassVar[str] = (
        "This is a defect of fusec; please report it. "
        'options={"verify": True} checks each stage and shows which one is to blame.'
    )

    def __init__(self, seen: object, *, stage: str = "") -> None:
        super().__init__(seen)
        self.stage = stage

    def in_stage(self, stage: str) -> StageError:
        """Record the stage, unless a deeper one was recorded already, and return this error."""
        self.stage = self.stage or stage
        return self

    def __reduce__(self) -> tuple[type[StageError], tuple[str], dict[str, object]]:
        # `seen` may be a node that cannot be pickled; the message needs only its text.
        return type(self), (str(self.args[0]),), dict(self.__dict__)

    def __str__(self) -> str:
        place = f" in stage {self.stage!r}" if self.stage else ""
        return f"{self.blame}{place}: {self.args[0]}\n{self.advice}"


class InvalidIR(StageError):
    """A verifier found a structure that is not legal at this stage."""

    blame = "invalid IR"


class InternalError(StageError):
    """A broken invariant, such as a node that no case of a `match` covers.

    `InternalError(node)` is enough: the message names the node's type beside its text.
    """

    blame = "internal error of fusec"

    def __init__(self, seen: object, *, stage: str = "") -> None:
        described = seen if isinstance(seen, str) else f"unexpected {type(seen).__name__}: {seen}"
        super().__init__(described, stage=stage)


class KernelFault(FusecError):
    """A kernel crashed, hung or failed when it first ran, in a process of its own.

    Args:
        seen: what it did, as "did not end in 20 s".
    """

    def __str__(self) -> str:
        return f"its first run, in a process of its own, {self.args[0]}"


def note_stage(error: BaseException, stage: str) -> None:
    """Record the stage that an exception comes from, unless a deeper one was recorded already."""
    if not stage_of(error):
        error.fusec_stage = stage  # type: ignore[attr-defined]


def stage_of(error: BaseException) -> str:
    """Return the stage that an exception comes from, "" if none was recorded."""
    own = error.stage if isinstance(error, StageError) else ""
    return own or str(getattr(error, "fusec_stage", ""))


class WrongResult(FusecError):
    """A kernel, or a graph, computes something else than eager (``fusec/tools/verify``).

    Args:
        value, op: name of the wrong value in the graph, and the ATen operation that makes it.
        seen: the errors and where they are largest, or strides.
        source: the user's lines that made the value.

    Attributes:
        passes: the names of the user's passes that rewrote the graph.
    """

    advice: ClassVar[str]
    passes: tuple[str, ...] = ()

    def __str__(self) -> str:
        *kernel, graph, value, op, seen, source = self.args
        place = f"kernel {kernel[0]} of graph {graph!r}" if kernel else f"graph {graph!r}"
        lines = "".join(f"\n  {line}" for line in source)
        helps = _suspected(self.passes) or self.advice
        return f"{place} is off in {value} ({op}): {seen}{lines}\n{helps}"


class WrongKernel(WrongResult):
    """A kernel is off: ``WrongKernel(kernel, graph, value, op, seen, source)``.

    Attributes:
        held: the node whose value is off, and which of its results.
        stored: the values that it was computed from, or had been stored before.
    """

    advice = (
        "This is a defect of fusec; please report it with the kernel, which "
        'options={"dump_dir": "DIR"} writes.'
    )
    held: tuple[str, int | None] = ("", None)
    stored: frozenset[tuple[str, int | None]] = frozenset()


class WrongGraph(WrongResult):
    """A graph is off, by none of its kernels: ``WrongGraph(graph, value, op, seen, source)``.

    A value is a result, an input that is written, or a gradient.
    """

    advice = (
        "Each of its kernels agrees with eager, so that a rewrite of the graph, or its cut "
        "in forward and backward, is at fault. `fusec bisect --wrong SCRIPT` finds the least "
        "program that shows it; please report that."
    )


def _suspected(passes: Sequence[str]) -> str:
    """Return what to do about a value that is off where passes of the user rewrote its graph."""
    if not passes:
        return ""
    one = len(passes) == 1
    return (
        f"{'The pass' if one else 'The passes'} {', '.join(map(repr, passes))} rewrote this graph, "
        f"and {'has' if one else 'have'} to compute what eager computes: if it is right without "
        f"{'it' if one else 'them'}, by the option passes, no kernel of fusec is at fault."
    )


def describe_failure(error: Exception) -> str:
    """Return what stopped a compile, as full sentences, with advice or a way to learn more.

    An `EnvironmentProblem` has none, nor has a `PassError`: no smaller program shows more of it.
    """
    if isinstance(error, EnvironmentProblem | PassError):
        return str(error)
    advice = what_helps(error) or _BISECT
    return f"{type(error).__name__}: {str(error).rstrip('.')}. {advice}"


def what_helps(error: Exception) -> str:
    """Return what a user can do about an operation that torch does not trace, or ""."""
    return _ADVICE.get(type(error).__name__, "")


_BISECT = (
    "`fusec bisect --crash SCRIPT` finds the least program with this fault; "
    'options={"strict": True} makes it an error.'
)
_ADVICE = {
    "DynamicOutputShapeException": "The size of a result depends on data: "
    "torch._dynamo.config.capture_dynamic_output_shape_ops = True lets such graphs be traced."
}
"""By the names of torch's exceptions: this module imports no torch."""


def nearest(seen: str, valid: Iterable[str]) -> str | None:
    """Return the member of `valid` that `seen` most likely meant, or None if nothing is close.

    Dotted names are also tried by their last part, so that "triton.cudagraphs" finds "cudagraphs".
    """
    names = list(valid)
    for attempt in (seen.lower(), seen.lower().rpartition(".")[2]):
        if close := difflib.get_close_matches(attempt, names, n=1):
            return close[0]
    return None
