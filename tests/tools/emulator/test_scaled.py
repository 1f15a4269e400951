"""Products of factors with a scale for each block of terms, as Triton compiles `tl.dot_scaled`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusec.tools.emulator.launch import Arguments, Code, launch, span

M, N, K = 128, 64, 128


@triton.jit
def product(
    a, b, scales_a, scales_b, c,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """c[m, n] = sum(k: a[m, k] * scales_a[m, k // BLOCK] * b[n, k] * scales_b[n, k // BLOCK])"""
    m, n = tl.arange(0, M), tl.arange(0, N)
    k, block = tl.arange(0, K // PACKED), tl.arange(0, K // BLOCK)
    x = tl.load(a + m[:, None] * (K // PACKED) + k[None, :])
    y = tl.load(b + n[None, :] * (K // PACKED) + k[:, None])
    sx = tl.load(scales_a + m[:, None] * (K // BLOCK) + block[None, :])
    sy = tl.load(scales_b + n[:, None] * (K // BLOCK) + block[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot_scaled(x, sx, A, y, sy, B))


@dataclass(frozen=True, slots=True)
class Format:
    """Types of both factors, terms of a block, and whether a scale is an e4m3."""

    a: str
    b: str
    block: int
    fine: bool = False


FORMATS = {
    "mxfp8": Format("e4m3", "e4m3", 32),
    "mxfp8 of two types": Format("e4m3", "e5m2", 32),
    "mxfp4": Format("e2m1", "e2m1", 32),
    "nvfp4": Format("e2m1", "e2m1", 16, fine=True),
}
_TRITON = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5", "e2m1": "*u8"}
_TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def factor(kind: str, rows: int) -> tuple[Tensor, Tensor]:
    """Return a factor as it lies in memory, and its values."""
    if kind != "e2m1":
        memory = torch.randn(rows, K).to(_TORCH[kind])
        return memory, memory.double()
    codes = torch.randint(0, 16, (rows, K), dtype=torch.uint8)
    sizes = _SIZES[(codes & 7).long()].double()
    return codes[:, ::2] | codes[:, 1::2] << 4, torch.where(codes > 7, -sizes, sizes)


def scales(rows: int, form: Format) -> tuple[Tensor, Tensor]:
    """Return scales as they lie in memory, and the scale of each term."""
    if form.fine:
        memory = (torch.rand(rows, K // form.block) * 2).to(torch.float8_e4m3fn)
        values = memory.double()
    else:
        memory = torch.randint(122, 132, (rows, K // form.block), dtype=torch.uint8)
        values = 2.0 ** (memory.double() - 127)
    return memory, values.repeat_interleave(form.block, 1)


def compiled(form: Format, arch: int) -> Code:
    scale = "*fp8e4nv" if form.fine else "*u8"
    kinds = {"a": _TRITON[form.a], "b": _TRITON[form.b]}
    kinds |= {"scales_a": scale, "scales_b": scale, "c": "*fp32"}
    sizes = {"M": M, "N": N, "K": K, "BLOCK": form.block, "A": form.a, "B": form.b}
    sizes["PACKED"] = 2 if form.a == "e2m1" else 1
    names = product.arg_names
    source = ASTSource(
        product,
        {name: kinds.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in sizes.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in kinds},
    )
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    return Code.of(made.asm["ptx"], shared_bytes=made.metadata.shared)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("arch", "opcode"), [(120, "mma.sync"), (100, "@%p")])
def test_a_scaled_product_is_right(name: str, arch: int, opcode: str) -> None:
    torch.manual_seed(0)
    form = FORMATS[name]
    (a, left), (b, right) = factor(form.a, M), factor(form.b, N)
    (scales_a, of_left), (scales_b, of_right) = scales(M, form), scales(N, form)
    c = torch.zeros(M, N)
    code = compiled(form, arch)
    assert any(line.lstrip().startswith(opcode) for line in code.ptx.splitlines())
    tensors = (a, b, scales_a, scales_b, c)
    values = [tensor.data_ptr() for tensor in tensors]
    padding = [0] * (len(code.program.kernel.params) - len(values))
    launch(code, (1, 1, 1), Arguments((*values, *padding), tuple(map(span, tensors))), seed=0)
    expected = (left * of_left) @ (right * of_right).T
    torch.testing.assert_close(c.double(), expected, rtol=1e-5, atol=1e-3)
