"""The rendered site has every page, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_site_is_built_of_all_pages_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert {page.stem for page in tmp_path.glob("*.html")} - {"search", "404"} == pages


def test_each_page_is_in_the_site_s_menu() -> None:
    menu = re.findall(r"- (?:\w+: )?(\w+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
