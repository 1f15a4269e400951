"""The command line: ``fusec run model.py`` and the other ``COMMANDS``.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 a check failed, 2 wrong
usage, 3 the model or its compile failed, 4 the machine lacks something. An error ends with the
command to run next, and shows a traceback only with ``--traceback``.

A command is a module with ``HELP``, ``add_arguments(parser)`` and ``run(arguments) -> exit code``.
Parsing imports no torch: ``fusec --help`` is instant, and each ``run`` imports what it needs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from fusec import __version__
from fusec.errors import (
    EnvironmentProblem,
    FusecError,
    ModelError,
    NotWritable,
    OutOfMemory,
    Unsupported,
    UsageError,
    nearest,
)
from fusec.options import environment_variables
from fusec.tools.cli import (
    bisect,
    build,
    cache,
    check,
    doctor,
    dump,
    explain,
    lock,
    profile,
    report,
    run,
)
from fusec.tools.cli.output import said, show, write_nowhere

_COMMANDS = (run, report, profile, explain, check, bisect, dump, build, lock, cache, doctor)
COMMANDS = {command.__name__.rpartition(".")[2]: command for command in _COMMANDS}


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UsageError``."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[0].upper()}{message[1:]}.{self._hint(message)}")

    def _hint(self, message: str) -> str:
        """Return a hint that names the option a misspelt one most likely meant, or ""."""
        words = [word.rstrip(":,") for word in message.split()]
        wrong = [word for word in words if word.startswith("--")]
        names = [option.removeprefix("--") for option in _options(self)]
        near = nearest(wrong[0].partition("=")[0].removeprefix("--"), names) if wrong else None
        return f" Did you mean '--{near}'?" if near and f"--{near}" not in words else ""


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser and of its commands."""
    found: list[str] = []
    for action in parser._actions:
        found += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found += _options(command)
    return list(dict.fromkeys(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(args)
    except BrokenPipeError:
        write_nowhere()  # the reader of stdout, `head` say, has closed it
        return 0
    except KeyboardInterrupt:
        print("fusec: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _fail(error, args)


def _run(args: list[str]) -> int:
    if args and not args[0].startswith("-") and args[0] not in COMMANDS:
        raise UsageError.unknown("command", args[0], COMMANDS)
    arguments = new_parser().parse_args(args)
    if arguments.command is None:
        new_parser().print_help()
        return 0
    with said(arguments.quiet):
        code: int = COMMANDS[arguments.command].run(arguments)
    return code


def new_parser() -> _Parser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="fusec",
        description="What the fusec compiler makes of a PyTorch model. To use it: "
        'torch.compile(model, backend="fusec").',
        epilog=_variables(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fusec {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(own)
        own.add_argument("-q", "--quiet", action="store_true", help="results and errors alone")
        own.add_argument(
            "--traceback", action="store_true", help="show where in the code an error came from"
        )
    return parser


def _variables() -> str:
    """Return the table of environment variables."""
    rows = environment_variables()
    width = max(len(row.name) for row in rows)
    lines = [
        f"  {row.name:<{width}}  {row.type:<5}  {row.help}"
        + (f" [{row.default}]" if row.default and "default" not in row.help else "")
        for row in rows
    ]
    return f"{_EXIT_CODES}\n\nenvironment variables:\n" + "\n".join(lines)


_EXIT_CODES = """exit codes:
  0  done
  1  a check failed: a result is wrong, or a kernel has a fault; bisect found something
  2  wrong usage
  3  the model, the script or the compile failed
  4  the machine lacks something, or memory is full
  (fusec run, fusec profile: the script's own, where it ends with one)"""


def _fail(error: Exception, args: list[str]) -> int:
    """Print an error and what to do next, and return its exit code."""
    if "--traceback" in args:
        traceback.print_exception(error)
    inner = getattr(error, "inner_exception", None)  # torch.compile wraps the original
    known = _out_of_memory(error) or inner or error
    seen, code = f"the compile failed: {type(known).__name__}: {known}", FusecError.exit_code
    if isinstance(known, FusecError):
        seen, code = str(known), known.exit_code
    print(f"fusec: error: {seen}\nnext: {_next(known, args)}", file=sys.stderr)
    if "--json" in args and args[0] not in ("run", "profile"):
        show(json.dumps({"schema": 1, "error": seen, "exit_code": code}))
    return code


def _out_of_memory(error: Exception) -> EnvironmentProblem | None:
    """Return an ``OutOfMemory`` if an error means full memory, on any device; None otherwise."""
    text = str(getattr(error, "inner_exception", None) or error)
    if isinstance(error, MemoryError) or any(sign in text for sign in _FULL):
        return OutOfMemory(f"memory is full: {text.splitlines()[0] if text else 'MemoryError'}")
    return None


_FULL = ("DefaultCPUAllocator: can't allocate memory", "CUDA out of memory", "HIP out of memory")


def _next(error: Exception, args: list[str]) -> str:
    """Return the command to run next, or advice where no command helps."""
    command = args[0] if args and args[0] in COMMANDS else ""
    if isinstance(error, OutOfMemory):
        return "smaller sizes; or fusec explain, which needs no memory"
    if isinstance(error, NotWritable):
        return "another directory, one that can be written"
    if isinstance(error, EnvironmentProblem):
        return "fusec doctor"
    if isinstance(error, ModelError):
        eagerly = "call the model itself on such inputs until that works"
        again = f"fusec {shlex.join([*args, '--traceback'])}"
        return eagerly if "--traceback" in args else f"{again}, or {eagerly}"
    if isinstance(error, UsageError):
        return f"fusec {command} --help" if command else "fusec --help"
    if isinstance(error, Unsupported):
        return "what the message names; until then the model runs, as eager kernels"
    return f"FUSEC_VERIFY=1 fusec {shlex.join([*args, '--traceback'])}"


__all__ = ["COMMANDS", "main", "new_parser"]
