"""What tests of the cache share: a directory that is not there yet, and no warning said before."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusec.runtime.cache import store as cache_module


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_warned", set())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "home" / "cache"
