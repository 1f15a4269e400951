"""The page, the table and the picture of benchmarks are what the command makes of the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import page


def test_the_page_is_what_the_command_writes() -> None:
    assert (page.ROOT / "docs/benchmarks.md").read_text(encoding="utf-8") == page.page()


@pytest.mark.parametrize("kind", ("cpu", "gpu"))
def test_readme_has_the_table_that_the_command_writes(kind: str) -> None:
    readme = (page.ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.finditer(page.BLOCK.format(kind.upper()), readme, re.S)
    assert table[0] == table[1] + page.short(kind) + table[2]


def test_a_case_measured_again_on_a_processor_counts_once() -> None:
    for part in (*page.parts("cpu"), *page.parts("gpu")):
        cases = [row.case for row in part.rows]
        assert len(set(cases)) == len(cases)
    xeons = [part for part in page.parts("cpu") if part.title.startswith("Intel")]
    rows = [row for part in xeons for row in part.rows]
    (attention,) = (row for row in rows if row.case == "attention, written out 4x8x1024x64")
    *_, latest = (
        run["results"]
        for run in page.runs("cpu")
        if "Intel" in run["machine"]["processor"] and attention.case in page.cases(run)
    )
    measured = {r["mode"]: r["ratios"] for r in latest if page.name(r) == attention.case}
    both = (measured["forward"]["eager/fusec"], measured["training"]["eager/fusec"])
    assert attention.ratios["eager/fusec"] == both  # of several measurements, the latest


@pytest.mark.slow
def test_the_picture_is_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page.picture(tmp_path / "images" / "page.png")
    assert (tmp_path / "images" / "page.png").read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "images" / "page.png", page.ROOT / page.IMAGE):
        assert path.stat().st_size < 150_000
