"""Check a command line before torch is imported.

Importing torch and Dynamo takes seconds; a misspelt type or target shall not wait for them.
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusec.errors import NotWritable, UsageError, nearest
from fusec.options import Options
from fusec.passes.stage import ASSEMBLY, LEVELS
from fusec.processors import DEVICES, PROCESSORS, target_called
from fusec.tools.cli.inputs import EXAMPLES, Inputs, add_inputs, parse_inputs
from fusec.tools.cli.output import hush, writing

EXPORTED = ".pt2"
"""The suffix of files that ``torch.export.save`` writes."""
FORM = "TARGET is path.py:name or module:name, such as model.py:Block or torch.nn:Softsign"
TARGET_NAMES = ("cpu", *PROCESSORS, *DEVICES)
"""The names in ``codegen.targets``, copied because importing that is slow."""
_REWRITES = """
    associative_scans rolled_loops equal_sizes whole_gradients spell_out masked_writes
    share_cat_prefixes fold_channels widen_images memory_formats channel_products winograd
    short_convolutions draws widen freeze softmax_gradients summed_products wide_products
    partition capture eager_rounding chunk simplify dead_code share row_parts split_reduction
    inline recompute unread fuse library_epilogue store_parts split_loop contract loops
    libraries layouts in_place fuse_horizontally memory infinite_masks online_softmax unroll_rows
    nested_sums coalesce unroll_parts factor_groups unroll_pairs unroll_windows unroll_terms scans
    guard_gathers plan lower parametrize vector_tiles base_two sink orient copy_tiles join_pairs
    approximate specialize_warps
"""
"""The names of ``fusec/driver/stages.py``, which imports torch."""
STAGES = tuple(dict.fromkeys((*LEVELS, *_REWRITES.split(), *ASSEMBLY)))
FORCED = ("race", "descriptors", "roles")
"""Options of a compile that commands have as options of their own, too."""
_HERE = ("cuda", "gpu", "native", "host")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Without any of these files there is no GPU; with one, only torch can tell which."""


def complete(arguments: argparse.Namespace) -> None:
    """Take the TARGET from the end of the SPECs, where ``--input SPEC TARGET`` parsed it as one.

    Raises:
        UsageError: if there is none.
    """
    given = arguments.input
    if arguments.model is None and len(given) > 1 and is_target(given[-1]):
        arguments.model = given.pop()
    if arguments.model is None:
        raise UsageError(f"The following arguments are required: TARGET. {FORM}.")


def is_target(text: str) -> bool:
    """Return True for a text of the form ``place:name``, or an exported program's file name."""
    if text.endswith(EXPORTED):
        return True
    place, colon, name = text.partition("(")[0].rpartition(":")
    return bool(colon and place and name.replace(".", "").isidentifier())


def check_model_line(
    arguments: argparse.Namespace, parse: Callable[[Sequence[str]], Inputs] = parse_inputs
) -> None:
    """Raise UsageError for errors in the text of a model's TARGET, inputs and target."""
    complete(arguments)
    parse(arguments.input)
    check_target_name(arguments.target)
    check_target_name(Options.from_compile(None, forced_options(arguments)).target)
    if arguments.model.endswith(EXPORTED):
        check_file(Path(arguments.model), FORM)
        return
    place = arguments.model.partition("(")[0].rpartition(":")[0]
    if not is_target(arguments.model):
        raise UsageError(f"target {arguments.model!r} names nothing in a file or module. {FORM}.")
    if place.endswith(".py"):
        check_file(Path(place), FORM)
    constructed(arguments.model.partition(":")[2])


def check_file(path: Path, form: str) -> None:
    """Raise UsageError if a Python file does not exist, with the nearest name that does."""
    if path.is_file():
        return
    folder = path.parent if path.parent.is_dir() else Path()
    near = nearest(path.name, [file.name for file in folder.glob(f"*{path.suffix or '.py'}")])
    hint = f" Did you mean {str(folder / near)!r}?" if near else ""
    raise UsageError(f"there is no file {str(path)!r}.{hint} {form}.")


def check_target_name(name: str | None) -> None:
    """Raise UsageError for an unknown target; for a device's name, it suggests its target."""
    if name is None or name in TARGET_NAMES:
        return
    own = target_called(name)
    if own is not None:
        raise UsageError(f"unknown target {name!r}: for that device it is {own!r}.")
    if name.lower() in _HERE:
        raise UsageError(f"unknown target {name!r}: leave --target out for this machine's own.")
    raise UsageError.unknown("target", name, TARGET_NAMES)


def forced_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a compile that the command line gives.

    Raises:
        UsageError: for an unknown option.
    """
    own = {name: getattr(arguments, name) for name in FORCED}
    given = {name: value for name, value in own.items() if value is not None}
    return {**Options.from_texts(arguments.option), **given}


def known_target(arguments: argparse.Namespace) -> str | None:
    """Return the target of a command line; None if only torch can tell this machine's GPU."""
    named = arguments.target or Options.from_compile(None, forced_options(arguments)).target
    return named or (None if any(map(os.path.exists, _DRIVERS)) else "cpu")


def check_stage_name(stage: str, arguments: argparse.Namespace) -> None:
    """Raise UsageError for an unknown stage, or one that a target does not have."""
    own = Options.from_compile(None, forced_options(arguments)).pass_names
    if stage not in (*STAGES, *own):
        raise UsageError.unknown("stage", stage, (*STAGES, *own))
    target = known_target(arguments)
    if stage in ASSEMBLY and target is not None and target not in DEVICES:
        raise UsageError(
            f"target {target!r} has no stage {stage!r}: its kernels are C++. Use --target "
            f"{'|'.join(DEVICES)}, or a stage out of {', '.join(LEVELS)}."
        )


def check_judged(target: str | None) -> None:
    """Raise UsageError for a target that the static checks do not cover."""
    if target is not None and target not in DEVICES:
        raise UsageError(
            f"target {target!r} has no static checks. Use --target {'|'.join(DEVICES)}: "
            "no GPU is needed."
        )


def check_directory(path: Path | None) -> None:
    """Make a directory; raise NotWritable if nothing can be written to it."""
    if path is None:
        return
    with writing(f"to {path}"):
        path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise NotWritable(f"cannot write to {path}: it is not yours to write")


def add_program(parser: argparse.ArgumentParser) -> None:
    """Declare what a command runs and all that follows it, "--" included, as one list."""
    add_inputs(parser, f"of a TARGET, an argument of the call: {EXAMPLES}")
    parser.add_argument("--train", action="store_true", help="of a TARGET: with a backward")
    parser.add_argument("--dynamic", action="store_true", help="of a TARGET: with symbolic sizes")
    parser.add_argument(
        "--all", action="store_true", help="of a script: compile also the models that it does not"
    )
    program = parser.add_argument(
        "program",
        metavar="TARGET|SCRIPT",
        nargs=argparse.PARSER,
        help="path.py:name or module:name, as of fusec check; or a Python file and its arguments",
    )
    program.required = False  # an --input before it may have taken it
    parser.set_defaults(parser=parser)


def take_program(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the TARGET or script that a command runs, and the script's own arguments.

    Options that follow a TARGET are parsed; after a script they are the script's own.

    Raises:
        UsageError: if there is none, or more than options follow a TARGET.
    """
    given, inputs = arguments.program or [], arguments.input
    given = given[given[:1] == ["--"] :]
    if not given and len(inputs) > 1 and (is_target(inputs[-1]) or inputs[-1].endswith(".py")):
        given = [inputs.pop()]
    if not given:
        raise UsageError(f"The following arguments are required: TARGET or SCRIPT. {FORM}.")
    first, *own = given
    if is_target(first):
        arguments.program = None
        arguments.parser.parse_args(own, arguments)
        hush(arguments.quiet)
        if left := arguments.program:
            raise UsageError(f"{left[0]!r} stands behind a TARGET, which takes options alone.")
    return first, own


def hint_behind(script: str, own: Sequence[str], commands: Mapping[str, str]) -> str:
    """Return a hint for an option of fusec's given after a script, which takes it as its own.

    Args:
        own: the script's arguments.
        commands: option -> the command that has it.
    Returns:
        "" without such an option, or where "--" precedes it.
    """
    found = [(k, word.partition("=")[0]) for k, word in enumerate(own)]
    meant = next(((k, name) for k, name in found if name in commands), None)
    if meant is None or "--" in own[: meant[0]]:
        return ""
    place, name = meant
    value = own[place + 1 : place + 2] if own[place] == name else []
    line = shlex.join(["fusec", *commands[name].split(), own[place], *value, script])
    return f"{name} behind the script was given to the script; if it is fusec's: {line}"


def constructed(name: str) -> tuple[str, list[Any], dict[str, Any]] | None:
    """Return (name, arguments, named arguments) of ``Block(64, bias=False)``; None for a name.

    Raises:
        UsageError: if an argument is no literal.
    """
    if "(" not in name:
        return None
    try:
        call = ast.parse(name, mode="eval").body
        if not isinstance(call, ast.Call) or isinstance(call.func, ast.Call):
            raise ValueError("no call")
        args = [ast.literal_eval(argument) for argument in call.args]
        if any(word.arg is None for word in call.keywords):
            raise ValueError("a dictionary of arguments")
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise UsageError(
            f"{name!r} is no call with numbers, strings, tuples, lists or dictionaries, such as "
            "'Block(64, bias=False)'."
        ) from error
    return ast.unparse(call.func), args, named
