"""Show where the time of a step goes: time, bytes, share of the floor, by kernel, module or line.

  fusec profile model.py:GPT --input "i64[2,64]<50257" --train
  fusec profile train.py --epochs 1
  fusec profile --by module --trace trace.json train.py --epochs 1

TARGET is run with random inputs on this machine, a call a step, with --train forward and backward.
A script runs as it is, compiled as fusec run does; its steps end with those of its optimizer, or
begin where its first graph is called again. Times are means over the middle half of the warm steps.
After the launches come rows for the Python between them, the optimizer and all else: rows add up
to the step.
For a script, options of fusec come before it, the script's own after it.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fusec.errors import UsageError
from fusec.tools.cli.inputs import parse_inputs
from fusec.tools.cli.line import (
    add_program,
    check_file,
    check_model_line,
    forced_options,
    hint_behind,
    is_target,
    take_program,
)
from fusec.tools.cli.output import check_writable, progress, show, user_code, write_file

if TYPE_CHECKING:
    from fusec.tools.report.profile import Profile

HELP = "show where a step's time goes, by kernel, module or line; --trace for a timeline"
_COMMANDS = {"-o": "run"} | dict.fromkeys(("--by", "--json", "--trace"), "profile")
"""Option -> the command that has it."""
VIEWS = ("kernel", "module", "line")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--by", metavar="|".join(VIEWS), default=VIEWS[0], help="what is a row; default: kernel"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the profile there, too")
    parser.add_argument(
        "--trace", metavar="FILE", type=Path, help="write a Chrome trace of some further steps"
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=10, help="of TARGET: that count; default: 10"
    )
    parser.add_argument("--race", metavar="auto|fused|library", help="of TARGET, as of fusec dump")
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="of TARGET: an option of the compile, as fusec --help lists them",
    )
    add_program(parser)
    parser.set_defaults(target=None, descriptors=None, roles=None, run=False)


def run(arguments: argparse.Namespace) -> int:
    """Print the profile; return 0, or the exit code of a script that fails."""
    first, own = take_program(arguments)
    if arguments.by not in VIEWS:
        raise UsageError.unknown("view", arguments.by, VIEWS)
    arguments.model = first if is_target(first) else None
    if arguments.model:
        if arguments.steps < 1:
            raise UsageError("--steps is 1 at least.")
        check_model_line(arguments)
    elif arguments.input or arguments.train:
        raise UsageError(f"{first!r} is a script; --input and --train are of a TARGET.")
    for file in filter(None, (arguments.json, arguments.trace)):
        check_writable(file)
    return _profile_target(arguments) if arguments.model else _profile_script(first, own, arguments)


def _profile_target(arguments: argparse.Namespace) -> int:
    # Local: these import torch, which a wrong command line shall not wait for.
    from fusec.tools.cli.model import load_with_inputs
    from fusec.tools.report.profile import Steps, profile_model
    from fusec.tools.report.stages import this_device

    device = this_device()
    progress(f"compiling and running {arguments.model} on {device}")
    with user_code(arguments):
        given = parse_inputs(arguments.input)
        fn, calls = load_with_inputs(arguments.model, given, arguments.train, device)
        made = profile_model(
            arguments.model,
            fn,
            calls[0],
            arguments.steps,
            train=arguments.train,
            dynamic=arguments.dynamic,
            options=forced_options(arguments),
            found=partial(Steps, trace=arguments.trace),
        )
    _show(made, arguments)
    return 0


def _profile_script(script: str, own: list[str], arguments: argparse.Namespace) -> int:
    path = Path(script)
    check_file(path, "SCRIPT is a Python file")
    for name in ("json", "trace"):  # the script may change the directory
        file = getattr(arguments, name)
        setattr(arguments, name, file and file.absolute())
    # Local: as above.
    from fusec.tools.report.profile import Steps, profile_of
    from fusec.tools.report.run_script import run_script
    from fusec.tools.report.stages import this_device
    from fusec.tools.report.watching import watch

    with watch(path.name) as watched:
        steps = Steps(watched.clock, arguments.trace)
        with steps.found_in_a_script():
            ran = run_script(path, own, every=arguments.all)
    if hint := hint_behind(script, own, _COMMANDS):
        progress(hint)
    graphs = [graph.summary for graph in watched.seen.graphs]
    if arguments.trace is not None and not steps.traced:
        progress("no trace: the script has too few steps")
    try:
        made = profile_of(path.name, this_device(), graphs, steps)
    except UsageError as nothing:
        if not ran.code:
            raise
        progress(str(nothing))  # the script ended before a step
        return ran.code
    _show(made, arguments)
    return ran.code


def _show(made: Profile, arguments: argparse.Namespace) -> None:
    from fusec.tools.report.profile import profile_page  # local, as above

    if arguments.json is not None:
        write_file(arguments.json, f"{made.to_json()}\n")
    show(profile_page(made, arguments.by))
