"""Words that the glossary retires stand nowhere in the code of the core or of the pages."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
CORE = ("ir", "frontend", "passes", "codegen", "driver", "runtime")


def retired(text: str) -> set[str]:
    """Return the names in the last column of the glossary's tables, those written as code."""
    rows = re.findall(r"^\|.*\|([^|\n]*)\|$", text, re.MULTILINE)
    return {name for last in rows for name in re.findall(r"`(\w+)`", last)}


def names_of(text: str) -> Iterator[str]:
    """Yield the identifiers of Python source."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.string


def found(file: Path, words: set[str]) -> set[str]:
    """Return the retired words that a file uses as names, a page only as code."""
    text = file.read_text(encoding="utf-8")
    names = names_of(text) if file.suffix == ".py" else re.findall(r"`(\w+)`", text)
    return words.intersection(names)


@pytest.mark.parametrize("folder", CORE)
def test_the_core_uses_no_retired_name(folder: str) -> None:
    words = retired(GLOSSARY.read_text(encoding="utf-8"))
    files = sorted((ROOT / "fusec" / folder).rglob("*.py"))
    assert files and words
    assert {f.name: found(f, words) for f in files if found(f, words)} == {}


def test_pages_use_no_retired_name() -> None:
    words = retired(GLOSSARY.read_text(encoding="utf-8"))
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert {p.name: found(p, words) for p in pages if p != GLOSSARY and found(p, words)} == {}


def test_a_retired_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(meaning):\n    return meaning\n")
    (tmp_path / "a.md").write_text("what `Bundle` was, a bundle\n")
    words = {"meaning", "Bundle"}
    assert found(tmp_path / "a.py", words) == {"meaning"}
    assert found(tmp_path / "a.md", words) == {"Bundle"}
