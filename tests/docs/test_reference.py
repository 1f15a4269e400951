"""The page of Python's interface is what the docstrings say."""

from __future__ import annotations

import pytest

import fusec
from tests.docs import reference
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "reference.md"


def test_the_page_is_as_the_docstrings_are(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-goldens"):
        PAGE.write_text(reference.page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == reference.page()


def test_every_public_name_is_on_it() -> None:
    assert {*fusec.__all__} - {"__version__"} == {*reference.FUNCTIONS}
