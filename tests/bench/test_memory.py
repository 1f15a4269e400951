"""The peak of a step's memory is what it holds at once, whatever the allocator kept before."""

from __future__ import annotations

import pytest
import torch

from bench.memory import RESET, peak_mib, peaks

TOLERANCE = 1.0
if not RESET.exists():
    pytest.skip("needs /proc/self/clear_refs", allow_module_level=True)


def test_a_peak_counts_results_and_what_lived_beside_them() -> None:
    x = torch.ones(4 << 20)  # 16 MiB
    assert peak_mib(x.neg) == pytest.approx(16, abs=TOLERANCE)
    assert peak_mib(lambda: x.neg().exp()) == pytest.approx(32, abs=TOLERANCE)
    assert peak_mib(x.numel) == pytest.approx(0, abs=TOLERANCE)


def test_memory_that_was_freed_before_is_counted_again() -> None:
    x = torch.ones(1 << 18)  # 1 MiB: small blocks stay with the allocator
    kept = [x.neg() for _ in range(64)]
    del kept
    assert peak_mib(lambda: [x.neg() for _ in range(32)]) == pytest.approx(32, abs=2 * TOLERANCE)


@pytest.mark.slow
def test_a_process_of_its_own_counts_what_a_step_holds_whatever_was_freed_before() -> None:
    """An MLP's forward, in MiB: its hidden layer of 6 and what it adds 1.5 to; eager holds two."""
    label = "mlp block 4x128x768 forward fp32"
    found = peaks(label, ["eager", "fusec"], shrink=1)
    assert found["eager"] == pytest.approx(12, abs=TOLERANCE)
    assert found["fusec"] == pytest.approx(7.5, abs=TOLERANCE)
    assert peaks(label, ["no such peer"], shrink=1) == {}
