"""A long hunt: `python -m tests.fuzz [--parts ...] [--seeds N | --hours H] [--resume]`.

Random programs of several parts (`tests/fuzz/parts.py`), each compared with eager. Each failure is
shrunk and written as a file that runs by itself; a crash or a hang is a finding, too. What became
of each seed, a program or some that are compiled together, is appended to a corpus: with
``--resume`` what failed is tried first, and what was right is left out. Exit code 1 where anything
was found.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

from tests.fuzz.hunt import Corpus, Hunt, first_failing, parse_seed, run_seeds, seeds_of
from tests.fuzz.parts import PARTS


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.child is not None:
        warnings.simplefilter("ignore")
        run_seeds(map(parse_seed, options.child))
        return 0
    names = options.parts or list(PARTS)
    corpus = Corpus.at(options.corpus)
    done = corpus.kinds if options.resume else {}
    seeds = seeds_of([PARTS[name] for name in names], options.first, done)
    if options.resume:
        seeds = first_failing(corpus, seeds, names)
    until = time.time() + options.hours * 3600 if options.hours else float("inf")
    most = options.seeds or (sys.maxsize if options.hours else 2000)
    hunt = Hunt(corpus, options.out, seeds, most, until)
    begun = time.time()
    hunt.run(options.jobs)
    minutes = (time.time() - begun) / 60
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(hunt.counts.items()))
    rate = hunt.programs / max(minutes, 1e-9)
    print(f"{hunt.programs} programs in {minutes:.1f} minutes, {rate:.1f} a minute: {kinds}")
    print(f"{len(hunt.found)} found" + "".join(f"\n  {path}" for path in hunt.found))
    return 1 if hunt.found else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    said = "default %(default)s"
    made.add_argument("--parts", nargs="+", choices=tuple(PARTS), help="default all")
    made.add_argument("--seeds", type=int, help="how many to run; default 2000, or all of --hours")
    made.add_argument("--hours", type=float, help="stop after these")
    made.add_argument("--first", type=int, default=0, help=f"the first one; {said}")
    made.add_argument("--jobs", type=int, default=1, help=f"children at once; {said}")
    made.add_argument("--resume", action="store_true", help="go on with what the corpus has")
    made.add_argument("--out", type=Path, default=Path("build/fuzz"), help=said)
    made.add_argument("--corpus", type=Path, default=Path("build/fuzz/corpus.jsonl"), help=said)
    made.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main())
