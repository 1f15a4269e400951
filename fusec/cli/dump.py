"""Print what a model becomes at each stage of the compiler, for any target; no GPU is needed.

fusec dump model.py:Block --input bf16[8,128,768]
fusec dump model.py:Block --input bf16[8,128,768] --target sm_90 --stage sass
fusec dump model.py:gpt --input "i64[2,64]<50257" --train -o dumps
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fusec.cli.inputs import EXAMPLES, parse_spec
from fusec.cli.output import progress, show
from fusec.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from fusec.report.stages import Staged

HELP = "print any stage of a model's compile, from the FX graph down to machine code"
DEFAULT_STAGE = "source"
_PYTHON = ("fx", "wrapper")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what dump and explain share: the model, its inputs, the target."""
    parser.add_argument(
        "model",
        metavar="TARGET",
        help="path.py:name or module:name: a module, its class, a function, or a function without "
        "arguments that returns a module",
    )
    parser.add_argument(
        "--input",
        metavar="SPEC",
        action="extend",
        nargs="+",
        default=[],
        help=f"an argument of the call: {EXAMPLES}; one for each, in order",
    )
    parser.add_argument(
        "--target", help="cpu, sm_80, sm_90, sm_100, sm_120 or gfx942; default: this machine's"
    )
    parser.add_argument(
        "--race",
        metavar="auto|fused|library",
        help="force one way where a group can run in several; default: auto, the faster one",
    )
    parser.add_argument(
        "--descriptors",
        metavar="auto|always|never",
        help="copy tiles of products by tensor descriptors (TMA); default: auto, if a race prefers "
        "it",
    )
    parser.add_argument("--train", action="store_true", help="the forward and the backward")
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "--stage",
        help="fx, graph, kernels, plan, program, source, wrapper, ttir, ttgir, llir, ptx or sass "
        f"(AMD's assembly for gfx942); default: {DEFAULT_STAGE}, and all of them with -o",
    )
    parser.add_argument(
        "-o",
        dest="directory",
        metavar="DIR",
        type=Path,
        help="write files there; prints their names",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print or write the wanted stages of every graph."""
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.report.stages import STAGES, check_stage, choose_target

    target = choose_target(arguments.target)
    if arguments.stage is not None:
        check_stage(arguments.stage, target)
    staged = stage_model(arguments)
    if not staged:
        raise UsageError("the call has no tensor operations, so there is nothing to dump.")
    if arguments.directory is None:
        for one in staged:
            _print_stage(one, arguments.stage or DEFAULT_STAGE)
        return 0
    for one in staged:
        for stage in STAGES:
            wanted = arguments.stage in (None, stage)
            if wanted and _has(one, stage):
                _write_stage(one, stage, arguments.directory)
        one.check()
    return 0


def forced_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the options of a compile that the command line gives."""
    forced = {"race": arguments.race, "descriptors": arguments.descriptors}
    return {name: value for name, value in forced.items() if value is not None}


def stage_model(arguments: argparse.Namespace) -> list[Staged]:
    """Return every graph of the model that the command line names, compiled to source text."""
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.cli.model import load_model
    from fusec.options import Options
    from fusec.report.stages import choose_target, take_through

    specs = [parse_spec(text) for text in arguments.input]
    choose_target(arguments.target)  # a wrong one is said before the model is loaded
    options = Options.from_compile(None, forced_options(arguments))
    progress(f"tracing {arguments.model}")
    model = load_model(arguments.model, len(specs))
    target = choose_target(arguments.target)  # after what the model's file sets in torch
    seen = model.observe(
        specs,
        train=arguments.train,
        dynamic=arguments.dynamic,
        options=options,
        scores=target.multiplies,
    )
    staged = []
    for one in seen:
        progress(f"compiling graph {one.name} for {target.name}")
        staged.append(take_through(one, target, options))
    return staged


def _has(staged: Staged, stage: str) -> bool:
    """Return whether a graph got as far as a stage that its target has."""
    return stage in staged.trace.stages or (
        stage in staged.target.assembly and staged.compiled is not None
    )


def _texts(staged: Staged, stage: str) -> list[tuple[str, str, str]]:
    """Return (name of the text, its language, the text) for one stage of one graph."""
    # Local: it imports torch, which `fusec --help` shall not wait for.
    from fusec.report.stages import assemble, assembly_text

    compiled = staged.compiled
    if stage in staged.trace.stages and stage != "source":
        return [(stage, "python" if stage in _PYTHON else "text", staged.text(stage))]
    if compiled is None:
        staged.check()
        return []
    if stage == "source":
        language = _LANGUAGES[staged.target.language]
        return [(name, language, source) for name, source in compiled.sources.items()]
    texts = []
    for number, name in enumerate(compiled.sources, 1):
        progress(f"{staged.name}: {name} to {stage} ({number} of {len(compiled.sources)})")
        asm = assemble(staged, name)
        texts.append((name, "text", assembly_text(asm, stage, staged.target)))
    return texts


_LANGUAGES = {"cpp": "cpp", "triton": "python"}
"""What a printer writes, as highlighters call it."""


def _print_stage(staged: Staged, stage: str) -> None:
    texts = _texts(staged, stage)
    if not texts:
        progress(f"graph {staged.name} has no kernels: all of it runs as eager kernels")
    for name, language, text in texts:
        mark = "//" if language == "cpp" or stage in staged.target.assembly else "#"
        what = stage if name == stage else f"{name}, {stage}"
        show(f"{mark} -- graph {staged.name}: {what}, {staged.target.name} --", language)
        show(text, language)
        show("")


_SUFFIXES = {"python": "py", "cpp": "cpp", "text": "txt"}


def _write_stage(staged: Staged, stage: str, directory: Path) -> None:
    folder = directory / staged.name
    for name, language, text in _texts(staged, stage):
        suffix = staged.target.assembly.get(stage, _SUFFIXES[language])
        path = folder / f"{name}.{suffix}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from error
        show(str(path))
