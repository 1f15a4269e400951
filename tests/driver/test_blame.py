"""A failed compile is blamed on a stage, an operation and the user's line."""

from __future__ import annotations

import warnings

import pytest
import torch

from fusec.driver.blame import Blame, blame
from fusec.errors import InternalError, InvalidIR, note_stage, stage_of
from tests.tools.bisect import plants


def model(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x)
    return y + 1


@pytest.fixture
def planted(own_stages: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setenv("FUSEC_CACHE", "0")
    plants.crashing_pass()


def test_the_warning_of_a_fallback_names_stage_operation_line_and_what_to_do(planted) -> None:
    x = torch.randn(4, 8)
    with pytest.warns(UserWarning) as caught:
        result = torch.compile(model, backend="fusec")(x)
    torch.testing.assert_close(result, model(x))
    text = str(caught[0].message)
    assert "compiling it failed in stage 'share' at tanh.default" in text
    assert "(test_blame.py:16 in model: y = torch.tanh(x)): ValueError: a planted crash." in text
    assert "`fusec bisect --crash SCRIPT`" in text
    assert caught[0].filename == __file__


def test_the_error_under_strict_can_be_blamed(planted) -> None:
    with warnings.catch_warnings(), pytest.raises(Exception, match="a planted crash") as raised:
        warnings.simplefilter("error")
        torch.compile(model, backend="fusec", options={"strict": True})(torch.randn(4, 8))
    line = "test_blame.py:16 in model: y = torch.tanh(x)"
    assert blame(raised.value) == Blame("share", "tanh.default", line)


def test_the_deepest_stage_is_kept() -> None:
    error = ValueError("odd")
    note_stage(error, "share")
    note_stage(error, "contract")
    assert stage_of(error) == "share"
    assert stage_of(InvalidIR("odd", stage="fuse")) == "fuse"
    found = InternalError("odd")
    note_stage(found, "inline")
    assert stage_of(found) == "inline"
    assert str(blame(ValueError("odd"))) == ""
