"""Links in README and the pages lead to files and headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, ROOT

PAGES = [
    path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return what a page's headings are called in links: lower case, words joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(page: Path) -> list[str]:
    """Return the links of a page that lead nowhere; those to other hosts are not followed."""
    found = []
    for link in LINK.findall(text_of(page)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        away = link.startswith("https://")
        if not away and (not target.exists() or (anchor and anchor not in anchors(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_lead_to_what_is_there(page: str) -> None:
    assert dead(ROOT / page) == []


PATH = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|h|cpp|c))`")


@pytest.mark.parametrize("page", sorted(PAGES))
def test_files_that_a_page_names_exist(page: str) -> None:
    named = PATH.findall((ROOT / page).read_text(encoding="utf-8"))
    places = (ROOT, ROOT / "fusec")
    assert [name for name in named if not any((p / name).exists() for p in places)] == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n[](#a-b-c) [](#d) [](gone.md) [](page.md#a-b-c) [](page.md#x)\n")
    assert dead(page) == ["#d", "gone.md", "page.md#x"]


def test_every_page_is_reached_from_readme() -> None:
    reached, left = {ROOT / "README.md"}, [ROOT / "README.md"]
    while left:
        page = left.pop()
        for link in LINK.findall(text_of(page)):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in reached:
                reached.add(target)
                left.append(target)
    pages = {ROOT / page for page in PAGES}
    assert sorted(pages - reached) == []
