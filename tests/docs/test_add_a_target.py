"""The page on adding a target: its row makes kernels, and its sizes are those by which they run."""

from __future__ import annotations

import pytest

from fusec.codegen.targets import TARGETS, find_target
from tests.docs.pages import python
from tests.passes.schedule.flat import bindings, rows

PAGE = "docs/add_a_target.md"


def test_the_row_of_the_page_makes_kernels_by_its_sizes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "sm_86", TARGETS["sm_80"])  # and without it afterwards
    add, replace_sizes = python(PAGE)
    namespace: dict[str, object] = {}
    kernel = rows(64, 20000)
    exec(add, namespace)
    assert "@triton.jit" in capsys.readouterr().out
    assert "k=lanes(32768)" in bindings(find_target("sm_86").plans(kernel)[0])
    exec(replace_sizes, namespace)
    assert "k=loop*16384" in bindings(find_target("sm_86").plans(kernel)[0])
