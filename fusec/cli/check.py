"""Judge every kernel of a model from its machine code, for any NVIDIA target; no GPU is needed.

  fusec check --static model.py:Block --input bf16[8,128,768] --target sm_90
  fusec check --static model.py:Block --input bf16[8,128,768] --target sm_90 --train --json

Exit code 1 if a kernel has a fault: it spills registers, moves less than 16 bytes at a time where
it could, misses the tensor cores, or does not fit the processor. docs/performance.md has the rules.
"""

from __future__ import annotations

import argparse

from fusec.cli.dump import add_model_arguments, stage_model
from fusec.cli.output import progress, show
from fusec.errors import UsageError

HELP = "judge every kernel from its machine code: registers, spills, access widths, tensor cores"
FAULTS = 1
"""The exit code where a kernel has a fault."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("--static", action="store_true", help="from the code, without a GPU")
    parser.add_argument("--json", action="store_true", help="as JSON, schema 1")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict; return 1 if a kernel has a fault."""
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.report.stages import choose_target
    from fusec.report.static_verdict import check_target, judge

    if not arguments.static:
        raise UsageError(f"give --static: fusec check --static {arguments.model} --input ...")
    check_target(choose_target(arguments.target).name)
    verdict = judge(stage_model(arguments), progress)
    show(verdict.to_json() if arguments.json else str(verdict))
    return FAULTS if verdict.faults else 0
