"""Random index programs: equal to eager or refused as eager refuses, and never out of bounds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fuzz.indices import run_seeds, run_watched

FEW, MANY = 16, 240


def test_programs_are_as_eager_s() -> None:
    faults, seen = run_seeds(range(FEW))
    assert not faults, "\n".join(map(str, faults))
    assert seen["refused by eager"] > FEW // 3 and seen["computed by eager"] > FEW // 3


@pytest.mark.slow
def test_kernels_touch_no_memory_outside_of_tensors(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("the sanitizers are those of g++")
    said = run_watched(range(MANY), tmp_path / "log")
    assert f"{MANY} index programs, 0 faults" in said, said


@pytest.mark.slow
def test_gpu_kernels_touch_no_memory_outside_of_tensors() -> None:
    faults, seen = run_seeds(range(FEW), "emulator")
    assert not faults, "\n".join(map(str, faults))
    assert seen["refused by eager"] > FEW // 3
