"""The tests that `make test` leaves to `make test-long`: functions, by `tests/long.txt`.

Listed are those whose cases take longest, until what is left takes five minutes on two cores.
``python -m tests.long_tests REPORT`` writes the list from what `pytest --junitxml REPORT` measured.
"""

from __future__ import annotations

import argparse
import functools
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).with_name("long.txt")
SECONDS = 600
"""Of two cores in five minutes."""


def is_listed(test: str) -> bool:
    """Return True if a test, by its name for pytest, is a case of a listed function."""
    return _function_of(test) in listed()


@functools.cache
def listed() -> frozenset[str]:
    """Return the functions that are listed, as ``tests/ops/test_views.py::test_a_view``."""
    return frozenset(LIST.read_text().splitlines())


def _function_of(test: str) -> str:
    return test.partition("[")[0]


def measured(report: Path) -> dict[str, list[float]]:
    """Return function -> seconds of each of its cases."""
    times: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = Path(*case.attrib["classname"].split(".")).with_suffix(".py")
        times[_function_of(f"{file}::{case.attrib['name']}")].append(float(case.attrib["time"]))
    return times


def longest(times: dict[str, list[float]], seconds: float) -> list[str]:
    """Return the functions with the longest cases without which the others take so many seconds."""
    left = sum(map(sum, times.values()))
    found: list[str] = []
    for function in sorted(times, key=lambda f: sum(times[f]) / len(times[f]), reverse=True):
        if left <= seconds:
            break
        left -= sum(times[function])
        found.append(function)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.long_tests", description=__doc__)
    parser.add_argument("report", type=Path, help="of pytest --junitxml")
    said = "that the other tests may take in it, on one core; default %(default)s"
    parser.add_argument("--seconds", type=float, default=SECONDS, help=said)
    options = parser.parse_args()
    LIST.write_text("\n".join(longest(measured(options.report), options.seconds)) + "\n")


if __name__ == "__main__":
    main()
