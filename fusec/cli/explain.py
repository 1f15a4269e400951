"""Show what the compiler makes of a model: kernels with the user's lines, what stays eager and why,
launches and bytes before and after, the floor, and the merges it took or rejected with their price.

  fusec explain model.py:Block --input bf16[8,128,768]
  fusec explain model.py:Block --input bf16[8,128,768] --target sm_90 --train --json
"""

from __future__ import annotations

import argparse

from fusec.cli.dump import add_model_arguments, stage_model
from fusec.cli.line import check_model_line
from fusec.cli.output import show_report

HELP = "show kernels, eager kernels, launches, bytes and fusion decisions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, schema 1")


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation of every graph."""
    check_model_line(arguments)
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.report import explanation
    from fusec.report.stages import choose_target
    from fusec.report.watching import watch

    target = choose_target(arguments.target)
    with watch() as watched:
        staged = stage_model(arguments)
    show_report(explanation(target.name, staged, watched.seen), json=arguments.json)
    return 0
