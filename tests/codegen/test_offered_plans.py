"""Each plan that a race may choose for some random programs, in the emulator, beside fp64.

More of them: ``python -m tests.fuzz --parts attention_plans_sm_90 product_plans_sm_90 ...``.
"""

from __future__ import annotations

import pytest

from tests.fuzz.plans import KINDS, TARGETS, check_seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_each_plan_of_a_random_program_is_right(target: str, kind: str, seed: int) -> None:
    check_seed(seed, kind, target)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 5])
def test_masks_of_both_axes_leave_nothing_unordered(seed: int) -> None:
    """Heads of 96 features beside ragged keys: threads loaded what descriptors should have."""
    check_seed(seed, "gradients", "sm_100")
