"""Random PyTorch programs, eager against the lowered kernels of every target."""

from __future__ import annotations

import pytest

from tests.fuzz import programs
from tests.fuzz.lowered import backend_of
from tests.fuzz.parts import PARTS, RIGHT
from tests.fuzz.programs import SMALL, draw, failure

LOWERED = [name for name in PARTS if name.startswith("lowered_")]
BATCH = 10
"""Programs a test: enough to be worth a line, few enough to find the seed at once."""


def check_seeds(part: str, seeds: range) -> None:
    for seed in seeds:
        verdict = PARTS[part].run(seed)
        assert verdict.kind == RIGHT, f"seed {seed} of {part}\n{verdict.source}"


@pytest.mark.parametrize("part", LOWERED)
def test_a_lowered_program_does_what_eager_does(part: str) -> None:
    seed = LOWERED.index(part)
    check_seeds(part, range(seed, seed + 1))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 300, BATCH))
@pytest.mark.parametrize("part", LOWERED)
def test_more_lowered_programs_do_what_eager_does(part: str, start: int) -> None:
    check_seeds(part, range(start, start + BATCH))


def test_seeds_reach_every_kind_of_line() -> None:
    text = "\n".join(draw(seed, SMALL).source() for seed in range(60))
    for kind in (programs.PAIRS, programs.SHARED, programs.PLACES):
        stems = [template.partition("{")[0] for template in kind]
        assert any(stem and stem in text for stem in stems), kind[0]


def test_sums_that_read_the_axis_of_pairs_are_right_on_gpus() -> None:
    """They ran along that axis (2026-11), on GPUs alone."""
    assert failure(draw(805, SMALL), backend_of("sm_90")) is None
