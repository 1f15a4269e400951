"""Limits of a test are the test's alone: what the run of the tests builds is built before them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.limits import descriptors_up_to, files_up_to
from tests.quick_build import quick_compiles
from tests.support import without_compiler

LIMITS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "files": partial(files_up_to, 0),
    "descriptors": partial(descriptors_up_to, 0),
    "compiler": without_compiler,
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_all_builds_share_is_made_before_a_limit(name: str, tmp_path: Path) -> None:
    with quick_compiles(tmp_path), LIMITS[name]():
        pass
    assert {"prelude.h", "prelude.h.gch"} <= {file.name for file in (tmp_path / "made").iterdir()}
