"""Loads at places that memory gave, in kernels that cannot report one that is out of range."""

from __future__ import annotations

import torch

import fusec
import tests.triton_backend  # noqa: F401 (registers the backends)
from tests.support import check


def gathered(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x[i] * 2


def test_a_gather_is_masked_in_a_triton_kernel() -> None:
    x, i = torch.randn(40, 64), torch.randint(40, (8,))
    (kernel,) = fusec.kernels(gathered, x, i, target="sm_90")
    (load,) = [line for line in kernel.source.splitlines() if "tl.load(arg0_1" in line]
    assert "mask=v_" in load
    check(gathered, x, i, backend="triton_interpreter")


def test_a_place_out_of_range_reads_nothing() -> None:
    x, i = torch.randn(40, 64), torch.tensor([1, 2])
    compiled = torch.compile(gathered, backend="triton_interpreter")
    assert torch.equal(compiled(x, i), gathered(x, i))
    found = compiled(x, torch.tensor([1, 10**12]))
    assert torch.equal(found[0], x[1] * 2) and not found[1].any()


def test_a_position_needs_no_mask() -> None:
    (kernel,) = fusec.kernels(
        lambda x: x[torch.arange(32)] * 2, torch.randn(32, 64), target="sm_90"
    )
    (load,) = [line for line in kernel.source.splitlines() if "tl.load(" in line]
    assert "mask=" not in load
