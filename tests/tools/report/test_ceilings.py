"""A machine's rates: measured once each, by sizes and types that are asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusec.tools.report.profile import Ceilings


@pytest.fixture
def ceilings() -> Ceilings:
    """Return rates of a machine on which a copy takes 1 ms and a product 10."""
    times = iter([1e-3, 10e-3, 4e-3, 20e-3])

    class Timed(Ceilings):
        def _best(self, call: Callable[[], object]) -> float:
            return next(times)

    return Timed(torch.device("cpu"))


def test_a_floor_is_the_longer_of_copy_and_products(ceilings: Ceilings) -> None:
    assert ceilings.floor_seconds(1 << 19, {}) == pytest.approx(0.5e-3)
    assert ceilings.floor_seconds(1 << 19, {"f32": 1 << 30}) == pytest.approx(10e-3)
    assert ceilings.floor_seconds(1 << 22, {"f32": 1}) == pytest.approx(4e-3)
    assert ceilings.floor_seconds(0, {}) == 0
    assert sorted(ceilings.copies) == [1 << 20, 1 << 22]
    assert list(ceilings.products) == ["f32"]


def test_rates_are_those_of_this_machine() -> None:
    here = Ceilings(torch.device("cpu"))
    assert 1e8 < here.copy_rate(1) < 1e13
    assert here.copy_rate(1 << 19) is here.copies[1 << 20]
