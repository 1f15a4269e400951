"""Check a model: its results beside eager's, or its kernels without a GPU.

  fusec check model.py:Block --input bf16[8,128,768] --train
  fusec check model.py:Block --input "bf16[8,128|77|200,768]" --dynamic
  fusec check --static model.py:Block --input bf16[8,128,768] --target sm_90
  fusec check --emulate model.py:Block --input bf16[2,16,64] --train

Without --static the model runs on this machine, on random inputs: eagerly, in fp64 and compiled.
With several sizes of an axis it is called for each in turn; --dynamic compiles once for all.
With --static nothing runs, and no GPU is needed: every kernel is compiled for the target, and has a
fault if it spills registers, moves less than 16 bytes at a time where it could, misses the tensor
cores, or does not fit the processor.
With --emulate every kernel that a GPU (sm_90, or --target sm_80) would run is executed on this
machine's CPU, and checked as it runs: bounds, races, barriers, waits. Use small sizes.
Exit code 1 if a result is wrong or a kernel has a fault.
"""

from __future__ import annotations

import argparse

from fusec.cli.dump import add_model_arguments, forced_options, stage_model
from fusec.cli.inputs import parse_spec
from fusec.cli.output import progress, show
from fusec.errors import UsageError

HELP = "check results against eager's, or kernels without a GPU: --static, --emulate"
FAULTS = 1
"""The exit code where a result is wrong or a kernel has a fault."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("--static", action="store_true", help="kernels, from their machine code")
    parser.add_argument("--emulate", action="store_true", help="kernels of a GPU, run on this CPU")
    parser.add_argument("--json", action="store_true", help="as JSON, schema 1")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict; return 1 if there is a fault."""
    if arguments.static and arguments.emulate:
        raise UsageError("--static runs nothing, --emulate runs kernels: leave out one of them.")
    if arguments.emulate:
        return _emulate_kernels(arguments)
    return _check_kernels(arguments) if arguments.static else _check_results(arguments)


def _check_kernels(arguments: argparse.Namespace) -> int:
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.report.lint_report import check_target, judge
    from fusec.report.stages import choose_target

    check_target(choose_target(arguments.target).name)
    verdict = judge(stage_model(arguments), progress)
    show(verdict.to_json() if arguments.json else str(verdict))
    return FAULTS if verdict.faults else 0


def _emulate_kernels(arguments: argparse.Namespace) -> int:
    # Local: as above.
    import torch

    from fusec.cli.model import load_with_inputs
    from fusec.report.emulation import TARGETS, emulate

    target = arguments.target or TARGETS[-1]
    if target not in TARGETS:
        raise UsageError.unknown("target for --emulate", target, TARGETS)
    specs = [parse_spec(text) for text in arguments.input]
    progress(f"running {arguments.model}: eagerly, in fp64 and emulated")
    fn, calls = load_with_inputs(arguments.model, specs, arguments.train, torch.device("cpu"))
    emulation = emulate(
        fn,
        *calls,
        train=arguments.train,
        dynamic=arguments.dynamic,
        target=target,
        options=forced_options(arguments),
    )
    show(emulation.to_json() if arguments.json else str(emulation))
    return FAULTS if emulation.faults else 0


def _check_results(arguments: argparse.Namespace) -> int:
    # Local: as above.
    from fusec.cli.model import load_with_inputs
    from fusec.report.comparison import compare, this_device

    if arguments.target is not None:
        raise UsageError(
            "results are compared on this machine's device. To check the kernels for a target, "
            f"write fusec check --static {arguments.model} --target {arguments.target}."
        )
    specs = [parse_spec(text) for text in arguments.input]
    device = this_device()
    progress(f"running {arguments.model} on {device}: eagerly, in fp64 and compiled")
    fn, calls = load_with_inputs(arguments.model, specs, arguments.train, device)
    comparison = compare(
        fn,
        *calls,
        train=arguments.train,
        dynamic=arguments.dynamic,
        options=forced_options(arguments),
    )
    show(comparison.to_json() if arguments.json else str(comparison))
    return FAULTS if comparison.faults else 0
