"""A long hunt: `python -m tests.fuzz [--programs 2000] [--start 0] [--only training]`.

Random PyTorch programs for the CPU, as many that train (views, writes, results that share memory),
and random products, attentions and patterns of models in Triton kernels run by Triton's
interpreter. Each failure is shrunk and written as a file that runs by itself. Exit code 1 where
anything was found. Programs that index are in `tests/fuzz/indices.py`, under AddressSanitizer.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.fuzz import test_products, training
from tests.fuzz.programs import as_file, draw, failure, shrunk

TOGETHER = 12
"""Training programs of one compile."""


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    last = options.start + options.programs
    found = [] if options.only == "training" else hunt(range(options.start, last), options.out)
    found += hunt_training(range(options.start, last), options.out, memory=options.memory)
    if options.only is None:
        few = range(options.start, options.start + options.programs // 20)
        found += hunt_models(few, options.out)
    print(f"{len(found)} failures" + "".join(f"\n  {path}" for path in found))
    return 1 if found else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    made.add_argument("--programs", type=int, default=2000, help="default %(default)s")
    made.add_argument("--start", type=int, default=0, help="first seed; default %(default)s")
    made.add_argument("--only", choices=("training",), help="one of the generators alone")
    made.add_argument("--no-memory", dest="memory", action="store_false",
                      help="training: no writes that autograd does not see")  # fmt: skip
    made.add_argument("--out", type=Path, default=Path("build/fuzz"), help="default %(default)s")
    return made


def hunt(seeds: Iterable[int], out: Path, *, quiet: bool = False) -> list[Path]:
    """Compare the programs of the seeds with eager; return the files of those that fail."""
    found = []
    for done, seed in enumerate(seeds):
        if not quiet and done % 50 == 0:
            print(f"program {seed}, {len(found)} failures", file=sys.stderr, flush=True)
        program = draw(seed)
        error = failure(program)
        if error is None:
            continue
        kind = type(error)
        small = shrunk(program, lambda p, kind=kind: type(failure(p)) is kind)
        found.append(_written(out / f"program_{seed}.py", as_file(small, failure(small) or error)))
    return found


def hunt_training(
    seeds: Sequence[int], out: Path, *, memory: bool = True, quiet: bool = False
) -> list[Path]:
    """Do the same for training programs, some of them compiled together.

    Args:
        memory: as of ``training.draw``.
    """
    found: list[Path] = []
    others = 0
    for at in range(0, len(seeds), TOGETHER):
        if not quiet and at % (4 * TOGETHER) == 0:
            said = f"{len(found)} failures, {others} refused as by AOTAutograd"
            print(f"training {seeds[at]}, {said}", file=sys.stderr, flush=True)
        drawn = [training.draw(seed, memory=memory) for seed in seeds[at : at + TOGETHER]]
        for program, differs in training.failures(drawn):
            if training.is_as_torch(program, differs):
                others += 1
                continue
            small = training.shrunk(program, lambda p: bool(training.wrong(p)))
            text = training.as_file(small, training.wrong(small))
            found.append(_written(out / f"training_{program.seed}.py", text))
    return found


def hunt_models(seeds: Iterable[int], out: Path) -> list[Path]:
    """Do the same for products, attentions and patterns of models in Triton kernels."""
    found = []
    for seed in seeds:
        for kind in test_products.KINDS:
            try:
                test_products.check_seed(seed, kind)
            except AssertionError as error:
                said, _, code = str(error).partition("\nfrom tests.")
                text = "".join(f"# {line}\n" for line in said.splitlines()) + f"from tests.{code}\n"
                found.append(_written(out / f"{kind}_{seed}.py", text))
    return found


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"{path}\n{text}", file=sys.stderr, flush=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
