"""The rendered site has every page, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def test_the_site_is_built_of_all_pages_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    made_of = {page.relative_to(tmp_path).with_suffix("") for page in tmp_path.rglob("*.html")}
    assert made_of - {Path("404")} == {page.relative_to(DOCS).with_suffix("") for page in PAGES}


def test_each_page_is_in_the_site_s_menu() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu = re.findall(r"- (?:\w+: )?([\w/]+\.md)$", text, re.MULTILINE)
    named = [page.relative_to(DOCS).as_posix() for page in PAGES]
    decisions = [page for page in named if re.match("decisions/(?!index)", page)]
    assert sorted(menu + decisions) == sorted(named)


def test_each_decision_is_in_the_index_of_decisions() -> None:
    listed = re.findall(
        r"\(([\w-]+\.md)\)", (DOCS / "decisions/index.md").read_text(encoding="utf-8")
    )
    pages = [page.name for page in PAGES if page.parent.name == "decisions"]
    assert sorted([*listed, "index.md"]) == sorted(pages)
