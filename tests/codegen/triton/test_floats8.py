"""Conversions of floats of 8 bits in Triton's interpreter, against torch's bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusec.codegen.triton.floats8 import functions
from fusec.frontend.shapes import to_torch_dtype
from fusec.ir.dtype import DTYPES, F8
from tests.float_cases import floats_near, narrowed
from tests.triton_interpreter import interpret

KERNEL = """
@triton.jit
def convert(x, codes, rounded, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(codes + at, _to_{0}(value))
    tl.store(rounded + at, _round_{0}(value))


@triton.jit
def read(codes, y):
    at = tl.arange(0, 256)
    tl.store(y + at, _of_{0}(tl.load(codes + at)))
"""


@pytest.mark.parametrize("dtype", [dtype.name for dtype in F8])
def test_conversions_are_torchs_bit_by_bit(dtype: str) -> None:
    kind = to_torch_dtype(DTYPES[dtype])
    imports = "import triton\nimport triton.language as tl\n"
    called = [f"@triton.jit\n{text}" for name, text in functions().items() if name.endswith(dtype)]
    source = "\n\n\n".join((imports, *called, KERNEL.format(dtype)))

    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    exact, read = every.view(kind).float(), torch.empty(256)
    interpret(source, "read", (1, 1, 1), (every, read))
    number = ~exact.isnan()
    assert torch.equal(read[number].view(torch.int32), exact[number].view(torch.int32))
    assert read[~number].isnan().all()

    cases, block = torch.from_numpy(floats_near(exact.numpy())), 1 << 18
    count = -(-len(cases) // block)
    x = torch.nn.functional.pad(cases, (0, count * block - len(cases)))
    codes, rounded = torch.empty(x.shape, dtype=torch.uint8), torch.empty_like(x)
    interpret(source, "convert", (count, 1, 1), (x, codes, rounded, block))
    wanted = narrowed(x, DTYPES[dtype])
    assert torch.equal(codes, wanted.view(torch.uint8))
    np.testing.assert_array_equal(rounded.numpy(), wanted.float().numpy())
