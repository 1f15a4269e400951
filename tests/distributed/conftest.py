"""What a process group leaves behind goes with its test."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_rank_is_named_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the hook in whose place torch puts one that names the rank in each line."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
