"""Which tests `make test` leaves to `make test-long`."""

from __future__ import annotations

import ast
from pathlib import Path

from tests import long_tests

REPORT = """<testsuites><testsuite>
<testcase classname="tests.ops.test_a" name="test_x[1]" time="3.0" />
<testcase classname="tests.ops.test_a" name="test_x[2]" time="1.0" />
<testcase classname="tests.ops.test_a" name="test_y" time="5.0" />
<testcase classname="tests.test_b" name="test_z[a[0]]" time="0.5" />
</testsuite></testsuites>"""


def test_each_listed_function_exists() -> None:
    root = Path(__file__).parent.parent
    files: dict[str, list[str]] = {}
    for function in sorted(long_tests.listed()):
        file, _, name = function.partition("::")
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        defined = {n.name for n in ast.parse((root / file).read_text()).body if hasattr(n, "name")}
        assert defined.issuperset(names), file


def test_those_with_the_longest_cases_are_listed_until_the_rest_is_short(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    times = long_tests.measured(report)
    assert times["tests/ops/test_a.py::test_x"] == [3.0, 1.0]
    assert long_tests.longest(times, 10) == []
    assert long_tests.longest(times, 4.5) == ["tests/ops/test_a.py::test_y"]
    both = ["tests/ops/test_a.py::test_x", "tests/ops/test_a.py::test_y"]
    assert long_tests.longest(times, 4.4) == both


def test_a_case_belongs_to_its_function() -> None:
    function = min(long_tests.listed())
    assert long_tests.is_listed(function) and long_tests.is_listed(f"{function}[a-b[0]]")
    assert not long_tests.is_listed(f"{function}_else")
