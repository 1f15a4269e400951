"""Find the part of fusec that is at fault, and write the smallest file that shows it.

  fusec bisect --wrong model.py:Block --input f32[8,128,768] --train
  fusec bisect --crash train.py --epochs 1
  fusec bisect --slower train.py

--wrong: results differ from eager's. --crash: a compile or a launch fails, by an exception or a
signal. --slower: a graph or a kernel takes more time than eager. The program runs in a process of
its own: a TARGET with --input, as for fusec check, or a script with its own arguments, as for fusec
run. It prints the graph, the kernel, the stage, the merge, your line, the options that help, and
a sentence for a bug report. FILE is the smallest program of plain torch that shows the fault:
its exit code is 1 (or a signal's) while the fault is there, 0 once it is mended.
Options of fusec come before the script. Exit code 0 if nothing is found, 1 if something is.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusec.errors import UsageError
from fusec.tools.cli.inputs import parse_inputs
from fusec.tools.cli.line import FORM, add_program, check_file, hint_behind, is_target, take_program
from fusec.tools.cli.output import check_writable, progress, quiet_torch, show, writing

if TYPE_CHECKING:
    from fusec.tools.bisect.source import Finding

HELP = "find the graph, kernel, stage or merge at fault, and the least file that shows it"
FOUND = 1
"""The exit code where something is at fault."""
_FILE = Path("fusec_repro.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    kinds = parser.add_mutually_exclusive_group()
    for kind, what in {
        "wrong": "results differ from eager's",
        "crash": "a compile or a launch fails",
        "slower": "a graph or a kernel is slower than eager",
    }.items():
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=what)
    parser.add_argument(
        "-o",
        dest="file",
        metavar="FILE",
        type=Path,
        default=_FILE,
        help="where the least program goes; default: %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, schema 1")
    parser.add_argument(
        "--seconds",
        type=float,
        default=100.0,
        help="that making the program smaller may take; default: %(default)g",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=1800.0,
        help="that the program may run before it is ended; default: %(default)g",
    )
    add_program(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the finding and write the file; return 1 if something is found."""
    first, own = take_program(arguments)
    program = read_program(first, own, arguments)
    file = arguments.file.absolute()
    check_writable(file)
    # Local: it imports torch, which a wrong command line shall not wait for.
    from fusec.tools.bisect.hunt import Hunt
    from fusec.tools.bisect.questions import WITHOUT_PASSES

    meant = dict.fromkeys(("-o", "--json"), f"bisect --{arguments.kind}")
    if hint := "" if is_target(first) else hint_behind(first, own, meant):
        progress(hint)
    progress(f"running {first}, in a process of its own")
    hunt = Hunt(arguments.kind, progress, seconds=arguments.seconds, timeout=arguments.timeout)
    finding = hunt.run(program)
    if finding is None:
        show('{"schema": 1, "found": false}' if arguments.json else "nothing found")
        return 0
    written = _write(file, finding)
    if arguments.json:
        show(finding.to_json())
    else:
        if WITHOUT_PASSES in finding.helps:
            show(f"{finding}\n\n{_OWN_PASS}")
            return FOUND
        near = os.path.relpath(file) if file.is_relative_to(Path.cwd()) else file
        shown = f"it shows when you run\n  python {near}" if written else _NO_FILE
        show(f"{finding}\n\n{shown}\n\nfor a bug report:\n  {finding.sentence}")
    return FOUND


_OWN_PASS = "the same graph agrees with eager without that pass, which is none of fusec's stages"
_NO_FILE = (
    "no file shows it by itself, neither on random inputs nor on the program's own:\n"
    "  FUSEC_DUMP_DIR=DIR keeps every stage of the whole program"
)


def _write(file: Path, finding: Finding) -> bool:
    """Write the finding's file, if it has one; an existing file with another text is renamed."""
    if not finding.source:
        return False
    with writing(file):
        if file.exists() and file.read_text(encoding="utf-8") != finding.source:
            old = file.with_suffix(".old.py")
            file.replace(old)
            progress(f"{file.name} was there: it is {old.name} now")
        file.write_text(finding.source, encoding="utf-8")
        if finding.values:
            import torch  # local: a wrong command line shall not wait for it

            torch.save(dict(finding.values), file.with_suffix(".pt"))
            progress(f"{file.with_suffix('.pt').name} beside it has the program's own inputs")
    return True


# -- the program -----------------------------------------------------------------------------------


def read_program(first: str, own: list[str], arguments: argparse.Namespace) -> Any:
    """Return a function that runs the user's program with a backend in fusec's place.

    Raises:
        UsageError: for a wrong command line, or a program that is neither a TARGET nor a script.
    """
    if not (arguments.seconds >= 0 and arguments.timeout > 0):
        raise UsageError("--seconds and --timeout are numbers of seconds, more than 0.")
    if arguments.kind is None:
        raise UsageError(
            "One of --wrong --crash --slower is required; options stand before a script."
        )
    if not is_target(first):
        check_file(Path(first), "SCRIPT is a Python file")
        if arguments.input:
            raise UsageError(f"--input is for a TARGET, as {first}:NAME; a script makes its own.")
        return partial(call_script, Path(first), own, arguments.all)
    parse_inputs(arguments.input)
    place = first.partition("(")[0].rpartition(":")[0]
    if place.endswith(".py"):
        check_file(Path(place), FORM)
    return partial(call_target, first, tuple(arguments.input), arguments.train, arguments.dynamic)


def call_script(path: Path, own: list[str], every: bool, backend: Any) -> None:
    """Run a script with another backend in fusec's place; what it prints goes to stderr.

    Raises:
        ModelError: if it raises.
    """
    # Local: these import torch, which a wrong command line shall not wait for.
    from contextlib import redirect_stdout
    from sys import stderr

    from fusec.errors import ModelError
    from fusec.tools.report.run_script import run_script

    with redirect_stdout(stderr), quiet_torch():
        ran = run_script(path, own, every=every, backend=backend)
    if ran.raised:
        raise ModelError(f"{path.name} ended with an exception that is none of fusec's, see above")


def call_target(
    model: str, specs: tuple[str, ...], train: bool, dynamic: bool, backend: Any
) -> None:
    """Call a TARGET with random inputs, twice, with another backend in fusec's place."""
    # Local: as above.
    import torch

    from fusec.tools.cli.model import load_with_inputs
    from fusec.tools.report.stages import this_device
    from fusec.torch_interior import tensors_in

    fn, calls = load_with_inputs(model, parse_inputs(list(specs)), train, this_device())
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    with torch.set_grad_enabled(train), quiet_torch():
        for inputs in calls * (2 if len(calls) == 1 else 1):
            roots = [r for r in tensors_in(inputs.call(compiled)) if r.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.randn_like(root) for root in roots])
