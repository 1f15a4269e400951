"""Run your script unchanged, and print one page of what was seen at its end.

  fusec run train.py --epochs 1
  fusec run --all --json seen.json train.py
  fusec run -o report.html train.py

What the script gives to torch.compile is compiled by fusec, also where it names no backend; --all
compiles every model that the script calls. The page has what to do first (graph breaks and
recompiles with their line, reason and remedy, graphs that run eagerly), graphs, time by module,
kernels and eager kernels by time, seconds of compile by phase, and peak memory. -o writes it as an
HTML report (fusec report --help), with each kernel's code and the time that it took.
Options of fusec come before the script, the script's own after it. The exit code is the script's;
3 where it ends with an exception, 130 where it is interrupted.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

from fusec.tools.cli.line import check_file, hint_behind
from fusec.tools.cli.output import check_writable, progress, show, write_file
from fusec.tools.cli.report import write_report

_COMMANDS = {"-o": "run", "--json": "run", "--trace": "profile"}
"""Option that writes something -> the command that has it."""
HELP = "run a script and show breaks, recompiles, time by module and kernel"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--all", action="store_true", help="compile also the models that the script does not"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the record there, too")
    parser.add_argument(
        "-o", dest="output", metavar="FILE", type=Path, help="write a report there, as HTML"
    )
    # The script and all that follows it, "--" included, in one list.
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        nargs=argparse.PARSER,
        help="a Python file, and its own arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the script and print the page; return the script's exit code."""
    path, own = _script(arguments)
    record = arguments.json and arguments.json.absolute()  # the script may change the directory
    report = arguments.output and arguments.output.absolute()
    # Local: it imports torch, which a wrong command line shall not wait for.
    from fusec.driver.observers import observing
    from fusec.tools.report.html import environment, render
    from fusec.tools.report.html.document import Collected
    from fusec.tools.report.run_script import run_script
    from fusec.tools.report.watching import watch

    if report is not None:
        environment()  # fails for a missing package before the script runs
    collecting = observing(Collected()) if report else nullcontext()
    with watch(path.name) as watched, collecting as collected:
        ran = run_script(path, own, every=arguments.all, backend=watched.beside.backend)
    if ran.taken:
        progress(f"{ran.taken} x torch.compile without backend='fusec': compiled by fusec here")
    seen = watched.seen
    try:
        if record is not None:
            write_file(record, f"{seen.to_json()}\n")
    finally:
        show(f"\n{seen}")
        if collected is not None:
            write_report(report, render(collected.document(seen)))
    if hint := hint_behind(str(path), own, _COMMANDS):
        progress(hint)
    if not (seen.graphs or seen.breaks or arguments.all or ran.code):
        progress("the script compiles nothing; --all compiles every model that it calls")
    return ran.code


def _script(arguments: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return the script and its arguments, after checks of the files to read and write."""
    script, *own = arguments.script[arguments.script[0] == "--" :]
    check_file(Path(script), "SCRIPT is a Python file")
    for file in filter(None, (arguments.json, arguments.output)):
        check_writable(file)
    return Path(script), own
