"""Print what a model becomes at each stage of the compiler, for any target; no GPU is needed.

fusec dump model.py:Block --input bf16[8,128,768]
fusec dump model.py:Block --input bf16[8,128,768] --target sm_90 --stage sass
fusec dump model.py:gpt --input "i64[2,64]<50257" --train -o dumps
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from fusec.errors import UsageError
from fusec.options import Options
from fusec.passes.stage import ASSEMBLY, LEVELS
from fusec.tools.cli.inputs import EXAMPLES, add_inputs, parse_inputs
from fusec.tools.cli.line import (
    FORCED,
    TARGET_NAMES,
    check_directory,
    check_model_line,
    check_stage_name,
    forced_options,
)
from fusec.tools.cli.output import progress, show, user_code, writing

if TYPE_CHECKING:
    from fusec.codegen.targets import Target
    from fusec.driver.context import CompileContext
    from fusec.tools.report.observe import Observed
    from fusec.tools.report.stages import Staged

HELP = "print any stage of a model's compile, from the FX graph down to machine code"
DEFAULT_STAGE = "source"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of commands that compile a model: its inputs, the target, options."""
    parser.add_argument(
        "model",
        metavar="TARGET",
        nargs="?",
        help="path.py:name or module:name: a module, its class, a function, or a function without "
        "arguments that returns a module; either with arguments: 'model.py:Block(64)'; or a "
        "FILE.pt2 of torch.export.save",
    )
    add_inputs(
        parser,
        f"an argument of the call: {EXAMPLES}; one for each, in order, or NAME=SPEC; or "
        "@FILE, as torch.save wrote it",
    )
    parser.add_argument(
        "--target", help=f"one of {', '.join(TARGET_NAMES)}; default: this machine's"
    )
    for option in fields(Options):
        if option.name in FORCED:
            about = option.metadata["about"]
            values = "|".join(about.choices)
            parser.add_argument(f"--{option.name}", metavar=values, help=about.help)
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any option of a compile, as fusec --help lists them: --option fusion=0",
    )
    parser.add_argument("--train", action="store_true", help="the forward and the backward")
    parser.add_argument(
        "--run",
        action="store_true",
        help="run the model on random inputs, where it asks for the values of tensors",
    )
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "--stage",
        help="fx, graph, kernels, plan, program, source, wrapper, ttir, ttgir, llir, ptx or sass "
        f"(AMD's assembly for gfx942); default: {DEFAULT_STAGE}, and all of them with -o. Or one "
        "of the rewrites between them, by its name in docs/design.md, such as inline, or a pass of "
        "yours that --option passes=NAME names",
    )
    parser.add_argument(
        "--changed",
        action="store_true",
        help="every rewrite that changed something, in order, from Dynamo's graph to the program",
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
    check_model_line(arguments)
    if arguments.stage is not None:
        check_stage_name(arguments.stage, arguments)
        if arguments.changed:
            raise UsageError("--changed prints many stages, --stage one: leave out one of them.")
    check_directory(arguments.directory)
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.tools.dumps import BEFORE_CAPTURE
    from fusec.tools.report.stages import check_assembly, choose_target

    if arguments.stage in ASSEMBLY:
        check_assembly(arguments.stage, choose_target(arguments.target))  # with this machine's
    whole = arguments.directory is not None and arguments.stage is None
    early = arguments.changed or whole or arguments.stage in BEFORE_CAPTURE
    staged = stage_model(arguments, texts=early)
    if not staged:
        raise UsageError(
            "nothing is compiled, so there is nothing to dump. `fusec explain` says why."
        )
    if arguments.directory is not None:
        _write(staged, arguments)
        return 0
    for one in staged:
        for stage in _wanted(one, arguments) or [arguments.stage or DEFAULT_STAGE]:
            _print_stage(one, stage)
    return 0


def _wanted(staged: Staged, arguments: argparse.Namespace) -> list[str]:
    """Return the stages of a graph to show, without stages that it did not reach."""
    # Local: it imports torch, which `fusec --help` shall not wait for.
    from fusec.tools.dumps import place_of
    from fusec.tools.report.stages import REWRITES

    if arguments.stage is not None:
        return [arguments.stage] if _has(staged, arguments.stage) else []
    if arguments.directory is None and not arguments.changed:
        return [DEFAULT_STAGE] if _has(staged, DEFAULT_STAGE) else []
    made = {stage: staged.made(stage) for stage in (*REWRITES, *staged.passes)}
    changed = [
        stage
        for stage, record in sorted(made.items(), key=lambda item: place_of(item[0]))
        if record is not None and record.text and record.changed
    ]
    if arguments.changed:
        return changed
    levels = [stage for stage in (*LEVELS, *ASSEMBLY) if _has(staged, stage)]
    return list(dict.fromkeys((*changed, *levels)))


def stage_model(
    arguments: argparse.Namespace,
    *,
    texts: bool = False,
    choose: Callable[[str | None], Target] | None = None,
    adapt: Callable[[CompileContext], CompileContext] = lambda context: context,
) -> list[Staged]:
    """Return every graph of the model that the command line names, compiled to source text.

    Args:
        texts: keep the texts of the stages before capture.
        choose: returns the target for a name, or without one; by default ``choose_target``.
        adapt: changes the context of each compile.
    """
    # Local: these import torch, which `fusec --help` shall not wait for.
    import torch

    from fusec.tools.cli.model import load_callable, load_with_inputs, observe_call
    from fusec.tools.report.observe import new_fake_mode, observe
    from fusec.tools.report.stages import choose_target, take_each, take_through

    given = parse_inputs(arguments.input)
    choose = choose or choose_target
    with user_code(arguments):
        choose(arguments.target)  # fails for a wrong name before the model is loaded
        progress(f"tracing {arguments.model}")
        mode = new_fake_mode()
        if arguments.run:
            cpu = torch.device("cpu")
            fn, calls = load_with_inputs(arguments.model, given, arguments.train, cpu)
        else:
            fn = load_callable(arguments.model, len(given), mode)
        # After the settings of torch in the model's file.
        target = choose(arguments.target)
        options = Options.from_compile(None, forced_options(arguments))
        how = {"dynamic": arguments.dynamic, "options": options, "texts": texts, "adapt": adapt}
        if arguments.run:
            seen = observe(fn, calls[0], train=arguments.train, target=target, run=True, **how)
        else:
            seen = observe_call(fn, given, mode, arguments.train, target=target, **how)

        def take(one: Observed) -> Staged:
            progress(f"compiling graph {one.name} for {target.name}")
            return take_through(one, target, options, adapt)

        return take_each(seen, take)


def _has(staged: Staged, stage: str) -> bool:
    """Return True if a graph has reached a stage that its target has."""
    return staged.made(stage) is not None or (
        stage in staged.target.assembly and staged.compiled is not None
    )


def _texts(staged: Staged, stage: str) -> list[tuple[str, str]]:
    """Return (name of the text, the text) for one stage of one graph."""
    from fusec.tools.report.stages import assemble  # local, as above

    if stage not in (*ASSEMBLY, "source"):
        return [(stage, staged.text(stage))]
    if staged.compiled is None:
        staged.check()
        return []
    sources = staged.compiled.sources
    if stage == "source":
        return list(sources.items())
    texts = []
    for number, name in enumerate(sources, 1):
        progress(f"{staged.name}: {name} to {stage} ({number} of {len(sources)})")
        texts.append((name, assemble(staged, name).text(staged.target.assembly[stage])))
    return texts


_LANGUAGES = {"cpp": "cpp", "py": "python"}
"""The suffix of a file -> the name of its language in syntax highlighters; others are text."""


def _print_stage(staged: Staged, stage: str) -> None:
    texts = _texts(staged, stage)
    if not texts:
        progress(f"graph {staged.name} has no kernels: all of it runs as eager kernels")
    language = _LANGUAGES.get(_suffix(staged, stage), "text")
    mark = "//" if language == "cpp" or stage in staged.target.assembly else "#"
    for name, text in texts:
        what = stage if name == stage else f"{name}, {stage}"
        show(f"{mark} -- graph {staged.name}: {what}, {staged.target.name} --", language)
        show(text, language)
        show("")


def _write(graphs: Sequence[Staged], arguments: argparse.Namespace) -> None:
    """Write the wanted stages of all graphs, and print the names of the files.

    Raises:
        NotWritable: if a file cannot be written.
        Exception: the error that stopped a graph's compile, after its earlier stages are written.
    """
    from fusec.tools.dumps import Dump, File  # local, as above

    with writing(f"to {arguments.directory}"):
        dump = Dump(arguments.directory)
    for one in graphs:
        files = [
            File(stage, "" if name == stage else name, _suffix(one, stage), text)
            for stage in _wanted(one, arguments)
            for name, text in _texts(one, stage)
        ]
        with writing(f"to {arguments.directory}"):
            paths = dump.write(one.name, one.observed.compile, one.target.name, files)
        for path in paths:
            show(str(path))
        one.check()


def _suffix(staged: Staged, stage: str) -> str:
    from fusec.tools.dumps import suffix_of  # local, as above

    return staged.target.assembly.get(stage) or suffix_of(stage, staged.target.language)
