"""The table of docs/models.md: --update-goldens writes it, each slow run compares it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import fusec
from tests.models.architectures import ARCHITECTURES, SIZES, Architecture

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARK = "<!-- written by tests/models/test_models_page.py -->\n"
HEAD = """\
| architecture | class | launches, eager to fusec | eager kernels that stay |
|---|---|---|---|
"""


def line_of(name: str, row: Architecture) -> str:
    """Return a line of the table: a training step, forward and backward."""
    if row.graphs > 1:
        return f"| {name} | `{row.model}` | | Dynamo breaks its graph: {row.graphs} graphs |\n"
    given = row.arguments(SIZES[0])
    report = fusec.explain(row.build(), *given, train=True, target="cpu:avx512")
    eager = sum(graph.launches_eager for graph in report.graphs)
    launches = sum(graph.launches for graph in report.graphs)
    kept = Counter(
        extern.op.removesuffix(".default") for graph in report.graphs for extern in graph.externs
    )
    listed = ", ".join(f"{count} {op}" for op, count in kept.most_common())
    return f"| {name} | `{row.model}` | {eager} to {launches} | {listed} |\n"


@pytest.mark.slow
def test_the_table_is_written(request):
    lines = [line_of(name, row) for name, row in ARCHITECTURES.items()]
    page = PAGE.read_text(encoding="utf-8")
    before, _, _ = page.partition(MARK)
    written = f"{before}{MARK}{HEAD}{''.join(lines)}"
    if request.config.getoption("--update-goldens"):
        PAGE.write_text(written, encoding="utf-8")
    else:
        assert page == written, "--update-goldens writes docs/models.md anew"


def test_every_architecture_has_its_line():
    _, _, table = PAGE.read_text(encoding="utf-8").partition(f"{MARK}{HEAD}")
    assert [line.split(" | ")[0][2:] for line in table.splitlines()] == list(ARCHITECTURES)
