"""Run a script of yours, nothing changed in it, and end with one page of what was seen.

  fusec run train.py --epochs 1
  fusec run --all --json seen.json train.py

What the script gives to torch.compile is compiled by fusec, also where it names no backend; --all
compiles every model that the script calls. The page has what to do first (graph breaks and
recompiles with their line, reason and remedy, graphs that run eagerly), graphs, time by module,
kernels and eager kernels by time, seconds of compile by phase, and peak memory.
Options of fusec come before the script, the script's own behind it. The exit code is the script's;
3 where it ends with an exception.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fusec.cli.line import check_file
from fusec.cli.output import progress, show
from fusec.errors import NotWritable, UsageError

HELP = "run a script and show breaks, recompiles, time by module and kernel"
FAILED = 3
"""The exit code where the script raises."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--all", action="store_true", help="compile also the models that the script does not"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the record there, too")
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file")
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the script and print the page; return the script's exit code."""
    _check_files(arguments)
    # Local: it imports torch, which a wrong command line shall not wait for.
    from fusec.report.script import run_script
    from fusec.report.watching import watch

    with watch(arguments.script.name) as watched:
        code, replaced = run_script(arguments.script, arguments.arguments, every=arguments.all)
    if replaced:
        progress(f"{replaced} x torch.compile without backend='fusec': compiled by fusec here")
    seen = watched.seen
    if arguments.json is not None:
        _write(arguments.json, seen.to_json())
    show(f"\n{seen}")
    if not seen.graphs and not seen.breaks and not arguments.all:
        progress("the script compiles nothing; --all compiles every model that it calls")
    return code


def _check_files(arguments: argparse.Namespace) -> None:
    check_file(arguments.script, "SCRIPT is a Python file")
    if arguments.json is not None and not arguments.json.resolve().parent.is_dir():
        raise UsageError(f"there is no directory for --json {str(arguments.json)!r}.")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise NotWritable(f"cannot write {path}: {error.strerror}") from error
