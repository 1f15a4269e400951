"""Write a model as one file, which ``fusec.load`` calls without compiling anything.

  fusec build model.py:Block --input f32[8,256] -o block.fusec
  fusec build model.py:gpt --input "i64[2,64]<50257" --train --with-weights -o gpt.fusec
  fusec build model.py:Block --input "f32[B,256]" -o block.fusec
  fusec build model.py:Block --input f32[8,256] --target sm_90,cpu -o block.fusec
  fusec build model.py:Block --input f32[8,256] --target cpu:avx2,cpu:avx512 -o block.fusec

The model has to be one graph: where Dynamo would end it, the lines are listed. Inputs may have
names (NAME=SPEC) or come from a file of nested ones (@FILE). Sizes are those of the inputs; a call
chooses each size that has a name, or with --dynamic every size that the model leaves open. The
parameters' values are no part of the file: --with-weights writes them beside it, in a file of the
same name that ends with .safetensors; without it, the model is built without memory for them.
With --native a program in C runs the file, too (docs/deploy.md): then no step may need torch.
With several targets the file has kernels for each, and the first that runs on a machine is taken,
of several for CPUs the one that uses most of it. "cpu" is the processor of this machine. No GPU is
needed to build for one, and no AVX-512 for that: how products run is then chosen by rule.
"""

from __future__ import annotations

import argparse
import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusec.errors import EnvironmentProblem, UsageError
from fusec.options import Options
from fusec.tools.cli.dump import add_model_arguments
from fusec.tools.cli.inputs import TensorInput, leaves, parse_named_sizes
from fusec.tools.cli.line import check_model_line, check_target_name, forced_options, known_target
from fusec.tools.cli.output import check_writable, progress, replacing, show, user_code
from fusec.tools.terminal import format_bytes

if TYPE_CHECKING:
    import torch

HELP = "write a model as one file, which fusec.load calls without compiling"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "--with-weights", action="store_true", help="write parameters and buffers beside it"
    )
    parser.add_argument(
        "--native", action="store_true", help="C can run it, without Python: see fusec.native"
    )
    parser.add_argument("-o", dest="file", metavar="FILE", type=Path, help="default: model.fusec")


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and print its size, digest and conditions."""
    targets = (arguments.target or "").split(",")
    arguments.target = None
    check_model_line(arguments, parse_named_sizes)
    for target in targets:
        check_target_name(target or None)
    _check_inputs(arguments)
    path: Path = arguments.file or Path("model.fusec")
    check_writable(path)
    # Local: these import torch, which `fusec --help` shall not wait for.
    from fusec.archive.model import KEY, conditions_of
    from fusec.archive.sizes import shown
    from fusec.export import build, weights_of
    from fusec.runtime.cache.entry import decode
    from fusec.tools.cli.model import load_callable
    from fusec.tools.report.observe import new_fake_mode

    mode, forced = new_fake_mode(), forced_options(arguments)
    forced |= {"native": True} if arguments.native else {}

    def options() -> list[Options]:
        return [_options(target or known_target(arguments), forced) for target in targets]

    if arguments.native and not any(one.native for one in options()):
        raise UsageError("--native is for CPUs: put cpu into --target.")
    given = parse_named_sizes(arguments.input)
    progress(f"building {arguments.model}")
    with user_code(arguments):
        memory = nullcontext() if arguments.with_weights else mode
        fn = load_callable(arguments.model, len(given), memory)
        # Options again, after the settings of torch in the model's file.
        content = build(fn, _call(arguments, mode), options(), mode)
    with replacing(path) as file:
        file.write_bytes(content)
    show(f"{path}: {len(content) / 1e3:.0f} kB")
    show(f"sha256: {hashlib.sha256(content).hexdigest()}")
    variants = (decode(KEY, content) or {}).values()
    asked = dict.fromkeys(shown(c) for variant in variants for c in conditions_of(variant))
    if asked:
        show(f"built for {', '.join(asked)}")
    if arguments.with_weights:
        _write_weights(path.with_suffix(".safetensors"), weights_of(fn))
    return 0


def _check_inputs(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options and inputs that an archive cannot have."""
    given = parse_named_sizes(arguments.input)
    if arguments.native and arguments.train:
        raise UsageError("--native is for inference: leave out --train.")
    if arguments.run:
        raise UsageError("--run is for models whose graphs depend on values; an archive has one.")
    specs = (*given.specs, *given.named.values())
    tensors = [spec for spec in leaves(list(specs)) if isinstance(spec, TensorInput)]
    if any(spec.later for spec in tensors):
        raise UsageError("an archive has one size of each input: leave out the others.")


def _options(target: str | None, forced: dict[str, Any]) -> Options:
    """Return the options of a compile for a target; races may run for this machine's CPU."""
    from fusec.tools.report.stages import choose_target  # local, as above

    row = choose_target(target)
    own: dict[str, Any] = {} if row.name == "cpu" else {"target": row.name}
    own |= {} if row.device == "cpu" else {"native": False}
    return Options.from_compile(None, {**forced, **own})


def _call(arguments: argparse.Namespace, mode: Any) -> Any:
    from fusec.export import Call  # local, as above
    from fusec.tools.report.arguments import Arguments  # local, as above

    specs, named = parse_named_sizes(arguments.input).read()
    sizes: list[tuple[torch.Tensor, tuple[str | None, ...]]] = []

    def make(spec: Any) -> Any:
        if not isinstance(spec, TensorInput):
            return spec
        tensor = spec.make()
        names = spec.names or (None,) * len(spec.shape)
        if arguments.dynamic:
            names = tuple(name or _name(n) for name, n in zip(names, spec.shape, strict=True))
        sizes.extend([(tensor, names)] * any(names))
        return tensor

    with mode:
        given = Arguments(tuple(specs), named).mapped(make)
    return Call(given.args, given.named, arguments.train, sizes, arguments.dynamic)


def _name(extent: int) -> str | None:
    """Return the name that ``--dynamic`` gives an extent; None for 0 and 1, which torch fixes."""
    return f"n{extent}" if extent > 1 else None


def _write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    try:
        from safetensors.torch import save_file  # local: only this needs it
    except ImportError as error:
        raise EnvironmentProblem(
            "--with-weights needs safetensors: pip install 'fusec[weights]'"
        ) from error
    with replacing(path) as file:
        save_file(weights, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    show(f"{path}: {format_bytes(size)}")
