"""What the pages' consoles show is what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.session import play

PAGES = ["slow", "wrong", "breaks", "recompiles", "deploy", "debugging"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_console_prints_what_the_page_shows(
    page: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    play(f"docs/{page}.md", tmp_path, update=pytestconfig.getoption("--update-goldens"))
