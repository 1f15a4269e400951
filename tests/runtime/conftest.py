"""What tests of the cache share: a directory that is not there yet, and no warning said before."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusec.runtime.cache.store import _warned


@pytest.fixture(autouse=True)
def _nothing_warned_yet() -> None:
    _warned.clear()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "home" / "cache"
