"""Conversions to narrow floats in the NumPy interpreter, against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.dtype import BF16, F8, F16, DType
from fusec.tools.interpreter.scalar import OPERATIONS, round_to
from tests.float_cases import floats_near, narrowed


@pytest.mark.parametrize("dtype", (F16, BF16, *F8), ids=str)
def test_values_are_rounded_as_torch_does(dtype: DType) -> None:
    signed = {1: torch.int8, 2: torch.int16}[dtype.itemsize]
    every = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    exact = every.to(signed).view(to_torch_dtype(dtype)).float().numpy()
    np.testing.assert_array_equal(round_to(dtype)(exact), exact)
    x = floats_near(exact)
    wanted = narrowed(torch.from_numpy(x), dtype).float().numpy()
    found = round_to(dtype)(x)
    np.testing.assert_array_equal(found, wanted)
    numbers = ~np.isnan(x) if dtype is BF16 else np.full(x.shape, True)  # a NaN keeps its sign
    np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(wanted[numbers]))
    np.testing.assert_array_equal(np.signbit(found[~numbers]), np.signbit(x[~numbers]))


def test_codes_of_four_bits_stand_for_sixteen_numbers() -> None:
    found = OPERATIONS["e2m1"](np.arange(32, dtype=np.uint8)).tolist()
    assert found[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert found[8:16] == [-x for x in found[:8]] and found[16:] == found[:16]
