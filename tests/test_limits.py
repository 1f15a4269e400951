"""Limits of a test are the test's alone: what the run of the tests builds is built before them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from fusec.codegen.cpp.prelude import prelude
from fusec.runtime.kernels import cpp_kernel
from tests.limits import descriptors_up_to, files_up_to
from tests.quick_build import prepare, quick_compiles
from tests.support import on_processor, without_compiler

AVX2 = "avx2 fma"

LIMITS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "files": partial(files_up_to, 0),
    "descriptors": partial(descriptors_up_to, 0),
    "compiler": without_compiler,
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_all_builds_share_is_made_before_a_limit(name: str, tmp_path: Path) -> None:
    with quick_compiles(tmp_path), LIMITS[name]():
        pass
    made = tmp_path / f"made{cpp_kernel.vector_width()}"
    assert {"prelude.h", "prelude.h.gch"} <= {file.name for file in made.iterdir()}


def test_vectors_of_another_width_have_another_prelude(tmp_path: Path) -> None:
    """Which test builds the first kernel of a run, and for what processor, is chance."""
    with quick_compiles(tmp_path):
        for features, width in (("", 4), (AVX2, 8), ("", 4)):
            with on_processor(features):
                prepare()
                text = (tmp_path / f"made{width}" / "prelude.h").read_text()
                assert text == prelude(width)
