"""What the pages' consoles show is what is printed, and their Python runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fusec
from tests.docs.pages import ROOT, files, python, steps
from tests.docs.session import play

DOCS = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md"))]
PAGES = [page for page in DOCS if steps(page)]
GIVEN = {"torch": torch, "fusec": fusec, "model": nn.Linear(4, 4), "train": lambda model: None}
"""What the snippets that are no files take for granted."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_console_prints_what_the_page_shows(
    page: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    play(page, tmp_path, update=pytestconfig.getoption("--update-goldens"))


@pytest.mark.parametrize("page", PAGES)
def test_python_that_is_no_file_runs(page: str) -> None:
    for text in python(page):
        if text not in files(page).values():
            exec(text, dict(GIVEN))


def test_pages_with_consoles_are_found() -> None:
    assert {"docs/slow.md", "docs/wrong.md", "docs/breaks.md", "docs/recompiles.md"} < {*PAGES}
