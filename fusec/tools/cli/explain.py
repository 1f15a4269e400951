"""Show what the compiler makes of a model: kernels with the user's lines, what stays eager and why,
launches and bytes before and after, the floor, and merges taken or rejected, with modelled times.

  fusec explain model.py:Block --input bf16[8,128,768]
  fusec explain model.py:Block --input bf16[8,128,768] --target sm_90 --train --json

With --static each kernel is compiled for the target, and has the time estimated from its machine
code, the floor as a share of that, and the largest cause of the rest. No GPU is needed.
"""

from __future__ import annotations

import argparse

from fusec.tools.cli.dump import add_model_arguments, stage_model
from fusec.tools.cli.line import check_judged, check_model_line, known_target
from fusec.tools.cli.output import progress, show_report

HELP = "show kernels, eager kernels, launches, bytes and fusion decisions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("--static", action="store_true", help="times, from the machine code")
    parser.add_argument("--json", action="store_true", help="as JSON, schema 1")


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation of every graph."""
    check_model_line(arguments)
    if arguments.static:
        check_judged(known_target(arguments))
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.tools.report import explanation
    from fusec.tools.report.stages import choose_target
    from fusec.tools.report.watching import watch

    target = choose_target(arguments.target)
    with watch() as watched:
        staged = stage_model(arguments)
    expected = {}
    if arguments.static:
        from fusec.tools.report.static_report import check_kernels  # local, as above

        expected = check_kernels(staged, progress).expected
    show_report(explanation(target.name, staged, watched.seen, expected), json=arguments.json)
    return 0
