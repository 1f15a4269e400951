"""What a launch does: the bytes that it moves, its multiply-adds, and its modelled time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fusec
from fusec.codegen.targets import CPU_MACHINE
from fusec.ir.graph import Extern, Kernel, all_launches, launched_externs
from fusec.passes.traffic import LaunchCost, work_of
from fusec.tools.report import KernelText


def made(*inputs: torch.Tensor, race: str) -> KernelText:
    """Return the one kernel of ``relu(x @ w)``."""
    (kernel,) = fusec.kernels(lambda x, w: F.relu(x @ w), *inputs, target="cpu", race=race)
    return kernel


X, W = torch.empty(64, 128), torch.empty(128, 256)
READ, WRITTEN = 4 * (64 * 128 + 128 * 256), 4 * 64 * 256


def work(kernel: KernelText) -> dict[type, LaunchCost]:
    compiled = kernel.staged.compiled
    assert compiled is not None
    launches = (*all_launches(compiled.schedule), *launched_externs(compiled.schedule))
    return {type(one): work_of(one, CPU_MACHINE) for one in launches}


def test_a_product_s_kernel_multiplies_and_moves_what_it_reads_and_writes() -> None:
    (found,) = work(made(X, W, race="fused")).values()
    assert (found.bytes, found.multiplied) == (READ + WRITTEN, {"f32": 64 * 128 * 256})
    assert found.us is not None and found.us > CPU_MACHINE.launch_us


def test_the_library_s_product_has_a_price_and_its_relu_multiplies_nothing() -> None:
    found = work(made(X, W, race="library"))
    assert found[Extern].bytes == READ + WRITTEN
    assert found[Extern].us is not None
    assert (found[Kernel].bytes, found[Kernel].multiplied) == (2 * WRITTEN, {})
