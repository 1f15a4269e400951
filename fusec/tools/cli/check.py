"""Check a model: its results beside eager's, or its kernels without a GPU.

  fusec check model.py:Block --input bf16[8,128,768] --train
  fusec check model.py:Block --input "bf16[8,128|77|200,768]" --dynamic
  fusec check --static model.py:Block --input bf16[8,128,768] --target sm_90
  fusec check --emulate model.py:Block --input bf16[2,16,64] --train
  fusec check --invariant model.py:Block --input "f32[1|2|33,16,64]"

Without --static the model runs on this machine, on random inputs: eagerly, in fp64 and compiled.
With several sizes of an axis it is called for each in turn; --dynamic compiles once for all.
With --static nothing runs, and no GPU is needed: every kernel is compiled for the target, and has a
fault if it spills registers, moves less than 16 bytes at a time where it could, misses the tensor
cores, or does not fit the processor.
With --emulate every kernel that a GPU (sm_90, or --target sm_80, sm_100, sm_120) would run is
executed on this machine's CPU, and checked as it runs: bounds, races, barriers, waits. Use small
sizes.
With --invariant the model is compiled under batch_invariant, and called with the sizes that --input
lists, here the first 1, 2 and 33 rows of the same inputs: each result has to have the same bits in
all calls, with any threads.
Exit code 1 if a result is wrong or a kernel has a fault.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from fusec.errors import UsageError
from fusec.processors import EMULATED
from fusec.tools.cli.dump import add_model_arguments, stage_model
from fusec.tools.cli.inputs import parse_inputs
from fusec.tools.cli.line import check_judged, check_model_line, forced_options, known_target
from fusec.tools.cli.output import progress, show_report, user_code

HELP = "check results against eager's, or kernels without a GPU: --static, --emulate"
FAULTS = 1
"""The exit code where a result is wrong or a kernel has a fault."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("--static", action="store_true", help="kernels, from their machine code")
    parser.add_argument("--emulate", action="store_true", help="kernels of a GPU, run on this CPU")
    parser.add_argument("--invariant", action="store_true", help="bits at several batch sizes")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="a line for each tensor, however many"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, schema 1")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict; return 1 if there is a fault."""
    check_model_line(arguments)
    if arguments.static + arguments.emulate + arguments.invariant > 1:
        raise UsageError(
            "--static, --emulate and --invariant check different things: leave out one of them."
        )
    _check_target(arguments)
    verdict = _check_kernels(arguments) if arguments.static else _check_calls(arguments)
    show_report(verdict, json=arguments.json, whole=arguments.verbose)
    return FAULTS if verdict.faults else 0


def _check_target(arguments: argparse.Namespace) -> None:
    """Raise UsageError for a target that the requested check does not support."""
    if arguments.static:
        check_judged(known_target(arguments))
    elif arguments.emulate and (arguments.target or EMULATED[0]) not in EMULATED:
        raise UsageError.unknown("target for --emulate", arguments.target, EMULATED)
    elif not arguments.emulate and arguments.target is not None:
        raise UsageError(
            "results are compared on this machine's device. To check the kernels for a target, "
            f"write fusec check --static {arguments.model} --target {arguments.target}."
        )


def _check_kernels(arguments: argparse.Namespace) -> Any:
    from fusec.tools.report.static_report import check_kernels  # local: it imports torch

    return check_kernels(stage_model(arguments), progress)


def _check_calls(arguments: argparse.Namespace) -> Any:
    """Return the report on calls of the model with random inputs."""
    # Local: these import torch, which `fusec --help` shall not wait for.
    import torch

    from fusec.tools.cli.model import load_with_inputs
    from fusec.tools.report.comparison import check_invariance, compare
    from fusec.tools.report.stages import this_device

    how = {"train": arguments.train, "dynamic": arguments.dynamic}
    judge: Callable[..., Any] = partial(compare, **how)
    device = torch.device("cpu")
    if arguments.invariant:
        if arguments.train:
            raise UsageError("--invariant compares results of inference: leave out --train.")
        judge, said = check_invariance, " under batch_invariant, at each size"
    elif arguments.emulate:
        from fusec.tools.report.emulation import emulate  # local, as above

        target = arguments.target or EMULATED[0]
        judge, said = partial(emulate, target=target, **how), ": eagerly, in fp64 and emulated"
    else:
        device = this_device()
        said = f" on {device}: eagerly, in fp64 and compiled"
    given = parse_inputs(arguments.input)
    progress(f"running {arguments.model}{said}")
    with user_code(arguments):
        fn, calls = load_with_inputs(arguments.model, given, arguments.train, device)
        return judge(fn, *calls, options=forced_options(arguments))
