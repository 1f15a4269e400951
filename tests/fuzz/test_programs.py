"""Random PyTorch functions, eager against the compiled ones, forward and backward."""

from __future__ import annotations

import pytest

from tests.fuzz.programs import program
from tests.support import check


def check_program(seed: int) -> None:
    fn, inputs = program(seed, 3 + seed % 5)
    try:
        check(fn, *inputs, train=seed % 2 == 1)
    except AssertionError as error:
        if "requires a gradient" not in str(error):
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("seed", range(6))
def test_compiled_program_does_what_eager_does(seed: int) -> None:
    check_program(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_compiled_programs_do_what_eager_does(seed: int) -> None:
    check_program(seed)
