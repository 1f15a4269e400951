"""Kernels of the whole GPU pipeline: run by Triton's interpreter against eager, and inspected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fusec.tools.report import kernels
from fusec.tools.report.stages import assemble
from fusec.tools.static_checks import inspect_kernel
from tests.support import check, values
from tests.triton_backend import triton_interpreter

BF16 = torch.bfloat16


def layer_norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    summed = x + r
    return summed, F.layer_norm(summed, (x.shape[-1],), w, b)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


def masked_softmax(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return (x * 0.5).masked_fill(~keep, -1e4).softmax(-1)


def bias_gelu_residual(x: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + b) + r


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y


def statistics(x: torch.Tensor) -> Any:
    return x.amax(1), x.mean(0), x.var(1), (x > 0).any(0), x.sum(), x.argmax(1), x.prod(1)


def transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.t() * 2 + y).contiguous()


def gather_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, table) * 2


def padded(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (1, 2), value=3.0).flip(1) + 1


# -- against eager -------------------------------------------------------------------------------


def test_layer_norm_with_residual() -> None:
    inputs = [values(6, 96, dtype=BF16, seed=s) for s in range(2)]
    check(layer_norm, *inputs, values(96, dtype=BF16), values(96, dtype=BF16, seed=3), **GPU)


GPU: dict[str, Any] = {"backend": triton_interpreter}
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "rms_norm": (rms_norm, (values(5, 80), values(80, seed=1))),
    "masked_softmax": (masked_softmax, (values(6, 70), values(6, 70, dtype=torch.bool))),
    "bias_gelu_residual": (
        bias_gelu_residual,
        (values(6, 64, dtype=BF16), values(64, dtype=BF16, seed=1), values(6, 64, dtype=BF16)),
    ),
    "rotary": (rotary, (values(2, 3, 4, 32), values(4, 32, seed=1), values(4, 32, seed=2))),
    "swiglu": (swiglu, (values(7, 33, dtype=BF16), values(7, 33, dtype=BF16, seed=1))),
    "transposed": (transposed, (values(40, 24), values(24, 40, seed=1))),
    "padded": (padded, (values(5, 13),)),
}


@pytest.mark.sampled(3)  # a diagonal
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_small_function(name: str, train: bool) -> None:
    fn, inputs = CASES[name]
    check(fn, *inputs, train=train, **GPU)


def test_layer_norm_in_training() -> None:
    args = (values(40, 64), values(40, 64, seed=1), values(64, seed=2), values(64, seed=3))
    check(lambda x, r, w, b: layer_norm(x, r, w, b)[1], *args, train=True, **GPU)


def test_reductions_of_every_kind() -> None:
    check(statistics, values(9, 37), **GPU)


def test_embedding() -> None:
    check(gather_rows, values(11, 48), torch.tensor([[3, 0, 10], [1, 1, 2]]), **GPU)


def test_dynamic_rows() -> None:
    check(rms_norm, values(5, 64), values(64, seed=1), dynamic=True, **GPU)


# -- inspected -----------------------------------------------------------------------------------


def inspected(fn: Callable[..., Any], *inputs: torch.Tensor, train: bool = False) -> list[Any]:
    """Return the static report of each kernel that is built for a GPU to run a function."""
    torch._dynamo.reset()  # or a second shape would be compiled as a dynamic one
    return [
        inspect_kernel(assemble(kernel.staged, kernel.name))
        for kernel in kernels(fn, *inputs, train=train, target="sm_90")
        if kernel.staged.compiled.code[kernel.name] == kernel.name
    ]


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_layer_norm_of_4096_columns_is_one_kernel_that_fits_registers() -> None:
    rows, row = tensor(8192, 4096), tensor(4096)
    (found,) = inspected(layer_norm, rows, rows, row, row)
    assert (found.widths("load"), found.widths("store")) == ({16: 16}, {16: 8})
    assert found.spill_bytes == 0
    assert found.registers <= 70
    assert found.convert_layouts == 0
    assert found.occupancy >= 0.5


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fn", "count"), [(swiglu, 2), (bias_gelu_residual, 3), (lambda x: x.relu() * 0.5 + 1, 1)]
)
def test_pointwise_kernel_has_wide_accesses_only(fn: Callable[..., Any], count: int) -> None:
    inputs = [tensor(4096, 4096), tensor(4096, 4096), tensor(4096, 4096)][:count]
    (found,) = inspected(fn, *inputs)
    assert set(found.widths("load")) == set(found.widths("store")) == {16}
    assert (found.convert_layouts, found.spill_bytes, found.barriers) == (0, 0, 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("columns", [1024, 4096, 16384])
def test_softmax_reads_a_row_once(columns: int) -> None:
    (found,) = inspected(lambda x: x.softmax(-1), tensor(4096, columns))
    assert set(found.widths("load")) == set(found.widths("store")) == {16}
    assert sum(found.widths("load").values()) == sum(found.widths("store").values())
    assert found.spill_bytes == 0


@pytest.mark.slow
def test_layer_norm_in_training_does_not_spill() -> None:
    rows, row = tensor(4096, 1024), tensor(1024)
    found = inspected(lambda *args: layer_norm(*args)[1], rows, rows, row, row, train=True)
    assert {kernel.spill_bytes for kernel in found} == {0}
