"""PyTorch's own compiler tests: `python -m tests.torch_suite PATH [-k CpuTests] [--seconds N]`.

PATH is the folder ``test`` of a checkout of PyTorch, of the version that is installed; none of it
is part of this repository. Tests that ask for Inductor's generated code, counters or settings are
skipped. What else fails is told, but for what ``expected.txt`` lists with its reason. Exit code 1
where a test fails that is not listed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torch_suite.plugin import read_log
from tests.torch_suite.process import run_pytest

EXPECTED = Path(__file__).with_name("expected.txt")
FILES = {
    "inductor/test_torchinductor.py": "CpuTests",
    "inductor/test_torchinductor_dynamic_shapes.py": "DynamicShapesCpuTests",
}
"""Files of the suite, and which of their tests need no GPU."""
WRONG = ("failed", "crashed")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a file's tests: a row for each, and whether all were run."""

    file: str
    rows: Sequence[Mapping[str, str]]
    whole: bool

    @property
    def counts(self) -> Mapping[str, int]:
        return Counter(row["outcome"] for row in self.rows)

    def unexpected(self, expected: Mapping[str, str]) -> list[str]:
        """Return what fails and is not listed, as lines."""
        return [
            f"{row['test']}: {row['outcome']}: {row.get('said', '')}"
            for row in self.rows
            if row["outcome"] in WRONG and f"{self.file}::{row['test']}" not in expected
        ]  # fmt: skip


def run_file(folder: Path, file: str, chosen: str, seconds: float = float("inf")) -> Result:
    """Run a file's tests in processes of their own: after a crash, the others go on in another.

    They are forks of one that has imported torch.
    """
    until = time.time() + seconds
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([run_pytest.__module__])
    with tempfile.TemporaryDirectory() as place:
        log, said = Path(place, "log"), Path(place, "said")
        seen = -1
        while seen < len(read_log(log)):
            seen = len(read_log(log))
            left = until - time.time()
            if left <= 0:
                break
            process = forks.Process(target=run_pytest, args=(folder, file, chosen, log, said))
            process.start()
            process.join(None if left == float("inf") else left)
            if process.exitcode is None:
                process.kill()
                process.join()
                rows = read_log(log)
                return Result(file, [r for r in rows if r["outcome"] != "crashed"], whole=False)
            if process.exitcode in (0, 1, 5):  # ended by itself; 5: nothing was left
                return Result(file, read_log(log), whole=True)
            if not read_log(log):
                raise RuntimeError(f"{file}: {said.read_text()[-4000:]}")
        return Result(file, read_log(log), whole=False)


def expectations(path: Path = EXPECTED) -> Mapping[str, str]:
    """Return the reasons of the tests that are known to fail."""
    found = {}
    for line in path.read_text().splitlines():
        test, _, reason = line.partition("#")
        if test.strip():
            found[test.strip()] = reason.strip()
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    wrong = []
    for file, chosen in FILES.items():
        if not (options.path / file).exists():
            print(f"{file}: not in {options.path}")
            continue
        both = f"({chosen}) and ({options.chosen})" if options.chosen else chosen
        result = run_file(options.path, file, both, options.seconds)
        wrong += result.unexpected(expectations())
        counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(result.counts.items()))
        print(f"{file}: {counts}{'' if result.whole else '; stopped before the end'}", flush=True)
    print("".join(f"  {line}\n" for line in wrong), end="")
    return 1 if wrong else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    made.add_argument("path", type=Path, help="the folder `test` of PyTorch")
    made.add_argument("-k", dest="chosen", help="of these, as pytest's -k")
    made.add_argument("--seconds", type=float, default=float("inf"), help="stop a file after these")
    return made


if __name__ == "__main__":
    sys.exit(main())
