"""The page on adding a schedule: its module and its entry plan kernels as it says."""

from __future__ import annotations

import types
from functools import partial
from pathlib import Path

import pytest

from fusec.passes import schedule
from tests.docs.console import fusec
from tests.docs.pages import blocks, python
from tests.planted import recode

PAGE = "docs/add_a_schedule.md"
MODEL = "def model(x):\n    return x.relu()\n"


def test_the_schedule_of_the_page_plans_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, entry = python(PAGE)
    short = types.ModuleType("short")
    exec(module, short.__dict__)
    (added,) = eval(f"({entry.strip()})", {"by_rule": schedule.by_rule, "short": short})
    products, *others = schedule.SCHEDULES  # of which `pointwise` is the first
    plans = partial(schedule.gpu_plans, schedules=(products, added, *others))
    recode(monkeypatch, "sm_90", plans=plans)
    (tmp_path / "mine.py").write_text(MODEL, encoding="utf-8")
    dump = ["dump", f"{tmp_path}/mine.py:model", "--target", "sm_90", "--stage", "plan", "--input"]
    printed = fusec([*dump, "f32[50]"])
    (shown,) = (block.text for block in blocks(PAGE) if not block.language)
    assert printed.splitlines()[1] == shown.strip()
    assert "warps=4" in fusec([*dump, "f32[500]"])
