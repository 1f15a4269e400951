"""Write an HTML report: one file that needs no network, and opens in any browser.

  fusec report model.py:Block --input bf16[8,128,768] -o report.html
  fusec report model.py:gpt --input "i64[2,64]<50257" --train --target sm_90 -o report.html

It draws each graph by modules, equal layers once: what eager execution launches, beside fusec's
kernels and their producers. A click, or Enter, on a kernel shows the lines of your program that it
computes, its index notation, schedule and source, for GPUs its machine code with registers and
verdict, and the decisions of fusion. Below are a roofline with each kernel's point,
memory over the call, and the time of compile by phase; above are graph breaks, with what to change.
Nothing runs, and no GPU is needed. A report of a script that runs: fusec run -o report.html.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fusec.tools.cli.dump import add_model_arguments, stage_model
from fusec.tools.cli.line import check_model_line
from fusec.tools.cli.output import check_writable, progress, show, write_file

HELP = "write an HTML report: graphs, kernels and their code, roofline, memory"
DEFAULT = Path("report.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        type=Path,
        default=DEFAULT,
        help=f"the file to write; default: {DEFAULT}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the report of every graph, and print where."""
    check_model_line(arguments)
    check_writable(arguments.output)
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.tools.report.html import environment, render
    from fusec.tools.report.html.document import document_of
    from fusec.tools.report.stages import choose_target
    from fusec.tools.report.static_report import check_known
    from fusec.tools.report.watching import watch

    environment()  # fails for a missing package before the model is loaded
    target = choose_target(arguments.target)
    with watch() as watched:
        staged = stage_model(arguments)
    judged = check_known(staged, progress)
    document = document_of(arguments.model, target.name, staged, watched.seen, judged=judged)
    write_report(arguments.output, render(document))
    return 0


def write_report(path: Path, html: str) -> None:
    """Write a report and print its name.

    Raises:
        NotWritable: if that fails.
    """
    write_file(path, html)
    show(str(path))
