"""Printed kernels on a device: each scalar operation against eager, and a whole row kernel."""

from __future__ import annotations

import pytest
import torch

from fusec.codegen.lowering.precision import rounded_to_16_bits
from fusec.ir.dtype import F32, F64, I32, I64, DType
from fusec.ir.index import Size
from fusec.ir.program import Program
from fusec.ir.scalar import SCALAR_OPS
from fusec.runtime.kernels.triton_kernel import TritonKernel, device_target, pack, unpack
from tests.codegen import programs
from tests.codegen.kernels import named_values, triton_source
from tests.codegen.triton.test_printer import TORCH_OPS, has, operands, pointwise

pytestmark = pytest.mark.gpu


def loaded(program: Program, *, approximate: bool = False) -> TritonKernel:
    kernel = triton_source(program, approximate=named_values(program) if approximate else None)
    return unpack(pack([kernel], device_target(0)), device=0)[kernel.name]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, t) for n in SCALAR_OPS for t in (F32, F64, I32, I64) if has(n, t)],
    ids=str,
)
def test_scalar_operation_is_as_accurate_as_eager(name: str, dtype: DType) -> None:
    args = [value.cuda() for value in operands(name, dtype)]
    eager = (TORCH_OPS.get(name) or getattr(torch, name))(*args)
    result = torch.zeros_like(eager)
    loaded(pointwise(name, dtype))(*args, result)
    if not dtype.is_float or eager.dtype is torch.bool:
        assert torch.equal(result, eager)
        return
    # Four units in the last place, and what flushing subnormal numbers to zero costs.
    relative = 4 * torch.finfo(eager.dtype).eps
    torch.testing.assert_close(result, eager, rtol=relative, atol=2e-38, equal_nan=True)


@pytest.mark.parametrize("name", ["div", "erf", "exp", "ndtr", "sigmoid", "sqrt", "tanh"])
def test_cheap_form_is_hidden_by_rounding_to_bf16(name: str) -> None:
    args = [value.cuda() for value in operands(name, F32)]
    eager = (TORCH_OPS.get(name) or getattr(torch, name))(*args)
    result = torch.zeros_like(eager)
    loaded(pointwise(name, F32), approximate=True)(*args, result)
    torch.testing.assert_close(result, eager, rtol=2e-5, atol=3e-7, equal_nan=True)


@pytest.mark.parametrize("offset", [0, 1])
def test_layer_norm_with_aligned_and_unaligned_rows(offset: int) -> None:
    rows, columns = 33, 4096
    program = programs.layer_norm(Size("M", 8192), columns)
    generator = torch.Generator(device="cuda").manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows * columns + offset, generator=generator, **options)[offset:]
    r = torch.randn(rows * columns, generator=generator, **options)
    w, b = (torch.randn(columns, generator=generator, **options) for _ in range(2))
    xr, y = torch.zeros(rows * columns, **options), torch.zeros(rows * columns, **options)
    loaded(program)(x, r, w, b, xr, y, rows)
    assert torch.equal(xr, x + r)
    wide = (x.float() + r.float()).view(rows, columns)
    expected = torch.nn.functional.layer_norm(wide, (columns,), w.float(), b.float())
    torch.testing.assert_close(y.view(rows, columns), expected.bfloat16())


def test_launch_runs_on_the_current_stream() -> None:
    program = programs.relu_chain(F32, 2**20, 1024, masked=False)
    assert rounded_to_16_bits(program) == frozenset()
    kernel = loaded(program)
    x = torch.randn(2**20, device="cuda")
    y = torch.zeros_like(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        kernel(x, y)
    side.synchronize()
    torch.testing.assert_close(y, x.relu() * 0.5 + 1.0)
