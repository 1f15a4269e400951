"""Planted faults of one test stay out of what another one asks of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusec.tools.verify import kernels


@pytest.fixture(autouse=True)
def nothing_is_off() -> Iterator[None]:
    """Forget what was off: a graph that is off is no finding where its kernels are."""
    yield
    kernels._tallies.clear()
