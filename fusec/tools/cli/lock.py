"""Record what the compiler makes of a model, and report later what changed.

  fusec lock model.py:Block --input bf16[8,128,768] --train -o model.lock
  fusec lock --check model.lock

The file is JSON for a review: kernels with what they compute and your lines, the order of sums,
eager kernels with reasons and libraries, launches, bytes and peak memory. It has no timings. Where
a product has several candidates, it has the one that an earlier race here chose, else the one that
the cost model prefers.

With --check the model is compiled as the file says, from the same directory, and nothing is timed:
candidates are those of the file. Exit code 1 if something changed: it prints each change, with
the line of your program and the decision that is the cause. No GPU is needed, whatever the target.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fusec import __version__
from fusec.errors import EnvironmentProblem, UsageError
from fusec.tools.cli.dump import add_model_arguments, stage_model
from fusec.tools.cli.line import FORCED, check_model_line
from fusec.tools.cli.output import check_writable, show, show_report, write_file

if TYPE_CHECKING:
    from fusec.codegen.targets import Target
    from fusec.tools.report.breaks import Break
    from fusec.tools.report.lock import Lock
    from fusec.tools.report.lock_file import Record

HELP = "write down what a model compiles to, or check that it is as it was: --check"
CHANGED = 1
"""The exit code where something changed."""
_OLD = re.compile(r"fusec lock \d+\n")
"""How files of the earlier forms begin, which were text and not JSON."""
_FLAGS = ("train", "dynamic", "run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("-o", dest="file", metavar="FILE", type=Path, help="write it there")
    parser.add_argument(
        "--check", metavar="FILE", type=Path, help="compare with a file that was written before"
    )
    parser.add_argument("--json", action="store_true", help="with --check: as JSON, schema 1")


def run(arguments: argparse.Namespace) -> int:
    """Write a file, or compare with one; return 1 if something changed."""
    if arguments.check is not None:
        return _check(arguments)
    if arguments.json:
        raise UsageError("--json is for --check: the file itself is JSON.")
    check_model_line(arguments)
    if arguments.file is not None:
        check_writable(arguments.file)
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.tools.report.lock_file import Record, print_lock

    text = print_lock(_locked(arguments, _asked(arguments), Record())[0])
    if arguments.file is None:
        show(text)
        return 0
    write_file(arguments.file, text)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    if arguments.model is not None or arguments.input or arguments.file is not None:
        raise UsageError("--check takes the file alone: it says which model, and with what inputs.")
    text = _read(arguments.check)
    # Local: as above.
    from fusec.tools.report.lock import read_target
    from fusec.tools.report.lock_changes import Changes, compare_locks
    from fusec.tools.report.lock_file import Pinned, parse_lock
    from fusec.tools.report.stages import this_machine

    old = parse_lock(text, str(arguments.check))
    pinned = Pinned({one.choice: one.candidate for one in old.choices})
    given = _parsed(old.asked, arguments)
    check_model_line(given)
    new, breaks = _locked(given, old.asked, pinned, lambda _: read_target(old.target))
    versions = (old.made_by, new.made_by) if old.made_by != new.made_by else None
    target = old.target.partition(",")[0]
    own = ["--target", target] if target != this_machine() else []
    again = shlex.join(["fusec", "lock", *old.asked, *own, "-o", str(arguments.check)])
    found = compare_locks(old, new, breaks)
    show_report(Changes(str(arguments.check), found, versions, again), json=arguments.json)
    return CHANGED if found else 0


def _locked(
    arguments: argparse.Namespace,
    asked: tuple[str, ...],
    record: Record,
    choose: Callable[[str | None], Target] | None = None,
) -> tuple[Lock, tuple[Break, ...]]:
    """Compile the model; return its record and the graph breaks."""
    # Local: as above.
    import torch

    from fusec.tools.report.lock import make_lock
    from fusec.tools.report.stages import choose_target
    from fusec.tools.report.watching import watch

    with watch() as watched:
        staged = stage_model(arguments, choose=choose, adapt=record.around)
    if watched.seen.unseen:
        raise UsageError(
            f"the model asks for the value of a tensor: {watched.seen.unseen}. Add --run, which "
            "runs it on random inputs."
        )
    target = staged[0].target if staged else (choose or choose_target)(arguments.target)
    made_by = f"fusec {__version__}, torch {torch.__version__}"
    lock = make_lock(made_by, asked, target, staged, record.candidates.items())
    return lock, watched.seen.breaks


def _asked(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the model, inputs and options of a command line in one order, without the target."""
    given = {name: getattr(arguments, name) for name in FORCED}
    forced = [f"{name}={value}" for name, value in given.items() if value is not None]
    words = [arguments.model, *(["--input", *arguments.input] if arguments.input else [])]
    words += [f"--{flag}" for flag in _FLAGS if getattr(arguments, flag)]
    return (*words, *(word for one in (*forced, *arguments.option) for word in ("--option", one)))


def _parsed(asked: tuple[str, ...], given: argparse.Namespace) -> argparse.Namespace:
    """Return the command line that a file keeps, with the other switches of this one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_model_arguments(parser)
    seen = f"the file asks for `{shlex.join(asked)}`"
    try:
        named, _ = parser.parse_known_args(asked)
    except argparse.ArgumentError as error:
        raise UsageError(f"{seen}: {error}.") from error
    if named.model is None or _asked(named) != asked:
        raise UsageError(f"{seen}, as no file of lock does.")
    return argparse.Namespace(**{**vars(given), **vars(named)})


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            return text
        # Reported before torch is imported.
        if _OLD.match(text):
            raise UsageError(
                f"{str(path)!r} has an earlier form, {text.splitlines()[0]!r}, which this fusec "
                "does not read: write it anew, by `fusec lock` with the model and inputs that it "
                "names."
            )
        raise UsageError(f"{str(path)!r} is no file of `fusec lock`, which writes JSON.")
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {str(path)!r}. `fusec lock TARGET -o` makes one."
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{str(path)!r} is no file of `fusec lock`: it is no text.") from error
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}") from error
