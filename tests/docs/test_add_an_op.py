"""The page on adding an operation: its function in its file lowers the operation as it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusec.frontend.ops import pointwise
from fusec.frontend.ops.registry import LOWERINGS
from tests.docs.console import run
from tests.docs.pages import Command, commands, python
from tests.support import check, check_captured, externs, values

PAGE = "docs/add_an_op.md"
OPERATION = torch.ops.aten.special_spherical_bessel_j0.default


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.special.spherical_bessel_j0(x) + 1


def test_the_operation_of_the_page_is_lowered_by_its_one_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.cat((values(5, 33), torch.tensor([[0.0, torch.inf, -torch.inf] * 11])))
    assert [op for op, _ in externs(model, x)] == ["special_spherical_bessel_j0.default"]
    monkeypatch.setenv("FUSEC_CACHE", "0")  # an entry has the eager kernel
    (text,) = python(PAGE)
    before = dict(LOWERINGS)
    try:
        exec(text, dict(pointwise.__dict__))
        torch._dynamo.reset()
        assert externs(model, x) == []
        check(model, x)
        check_captured(model, x)
    finally:
        LOWERINGS.clear()
        LOWERINGS.update(before)


@pytest.mark.parametrize("command", commands(PAGE), ids=lambda command: command.argv[0])
def test_a_console_line_works(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def model(x):\n    return x.exp()\n", encoding="utf-8")
    run(command, tmp_path)
