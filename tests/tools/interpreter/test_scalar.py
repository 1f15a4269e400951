"""Conversions of floats of 8 bits in the NumPy interpreter, against torch's bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.dtype import BF16, F8, F16, DType
from fusec.tools.interpreter.scalar import decode, encode
from tests.float_cases import floats_near, narrowed


@pytest.mark.parametrize("dtype", (F16, BF16, *F8), ids=str)
def test_conversions_are_torchs_bit_by_bit(dtype: DType) -> None:
    kind, layout = to_torch_dtype(dtype), dtype.format
    assert layout is not None
    signed, unsigned = {1: (torch.int8, np.uint8), 2: (torch.int16, np.uint16)}[dtype.itemsize]
    every = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    exact = every.to(signed).view(kind).float().numpy()
    np.testing.assert_array_equal(decode(every.numpy(), layout), exact)
    x = floats_near(exact)
    codes = encode(x, layout)
    wanted = narrowed(torch.from_numpy(x), dtype).view(signed).numpy().view(unsigned)
    number = ~np.isnan(x) if dtype.itemsize == 2 else slice(None)  # of NaN one code, no payload
    np.testing.assert_array_equal(codes[number], wanted[number])
