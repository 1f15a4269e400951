"""The page on adding a candidate: the library of the page is offered, raced and taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusec
from fusec.driver.race import RaceJudge
from fusec.frontend import linears
from tests.calls import calls_of
from tests.docs.pages import python
from tests.support import check, tune, values
from tests.verdicts import decide_products

PAGE = "docs/add_a_candidate.md"


@pytest.fixture
def page() -> Iterator[dict[str, object]]:
    """Yield the names of the page's code after it has run; its candidate is removed again."""
    known = list(linears._CANDIDATES)
    names: dict[str, object] = {"fusec": fusec}
    try:
        exec(python(PAGE)[0], names)
        yield names
    finally:
        linears._CANDIDATES[:] = known


def test_the_library_of_the_page_is_taken_and_computes_the_same(
    page: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compared() -> None:
        check(torch.nn.Linear(24, 40), values(128, 24), train=True)

    tune(monkeypatch, "races", product=1)
    decide_products(monkeypatch, tmp_path, "BLIS", compared)
    with calls_of(RaceJudge.__call__) as decisions:
        compared()
    assert decisions and {call.result.candidate for call in decisions} == {"BLIS"}


def test_graphs_of_other_candidates_are_other_entries_of_the_cache(
    page: dict[str, object],
) -> None:
    with_blis = linears.registered()
    linears._CANDIDATES.pop()
    assert linears.registered() != with_blis


def test_explain_names_the_candidate(
    page: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    exec(python(PAGE)[1], page)
    assert "BLIS" in capsys.readouterr().out
