"""Rows beyond the registers in machine code for sm_90, without a GPU: loops that wait for nothing.

What a thread has loaded it folds by itself, so no barrier is in a loop; the threads of a block meet
once, behind it. Each iteration has 16 KB under way, and registers leave room for several programs.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from fusec.driver.build import triton_source
from fusec.tools.assembly import Assembly, assembly_of
from fusec.tools.report.stages import Staged
from fusec.tools.static_checks import inspect_kernel
from tests.codegen.test_contraction_static import staged

WARPS = 64
"""Those that a multiprocessor of sm_90 holds."""


def compiled(one: Staged, name: str = "k0") -> Assembly:
    assert one.compiled is not None
    return assembly_of(triton_source(one.compiled, name), one.target.name)


def loops(sass: str) -> list[list[str]]:
    """Return the instructions of each loop, but for those that end a kernel."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    found = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(lines)
        elif code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(code[1])
            target = re.search(r"BRA.*`\((\.L\w+)\)", code[1])
            if target and target[1] in labels:
                found.append(lines[labels[target[1]] :])
    return [body for body in found if len(body) > 1]


def cross_entropy(classes: int, dtype: torch.dtype) -> list[Staged]:
    rows = torch.empty(8192, classes, dtype=dtype), torch.zeros(8192, dtype=torch.int64)
    return staged(F.cross_entropy, *rows, train=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cross_entropy_of_long_rows_loads_16_kilobytes_an_iteration(dtype: torch.dtype) -> None:
    asm = compiled(cross_entropy(128256, dtype)[0])
    found = inspect_kernel(asm)
    (body,) = loops(asm.sass)
    threads = 32 * asm.metadata["num_warps"]
    loads = sum("LDG" in line for line in body)
    assert not any("BAR" in line for line in body)
    assert set(found.widths("load")) == {16} and found.spill_bytes == 0
    assert loads * 16 * threads == 16384
    assert found.barriers <= 5  # behind the loop; 3 with Triton 3.9
    assert loads * 16 * found.occupancy * WARPS * 32 >= 96 << 10  # under way, a multiprocessor
    assert len(body) / (loads * 16) < 4.5  # thread-instructions a byte


def test_cross_entropy_of_an_odd_vocabulary_folds_within_threads() -> None:
    asm = compiled(cross_entropy(50257, torch.bfloat16)[0])
    (body,) = loops(asm.sass)
    assert not any("BAR" in line or "SHFL" in line for line in body)
    assert sum("LDG" in line for line in body) == 32
    assert inspect_kernel(asm).occupancy >= 0.35


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "amax", "sum", "std"])
def test_no_loop_over_a_long_row_has_a_barrier(name: str) -> None:
    x = torch.empty(4096, 65536, dtype=torch.bfloat16)
    (one,) = staged(lambda x: getattr(x, name)(-1), x)
    asm = compiled(one)
    assert loops(asm.sass)
    assert not any("BAR" in line for body in loops(asm.sass) for line in body)
    once = {2} if name == "std" else set()  # a row's first value, which the others stand beside
    assert set(inspect_kernel(asm).widths("load")) == {16} | once


def test_the_gradient_of_a_cross_entropy_moves_16_bytes_at_a_time() -> None:
    asm = compiled(cross_entropy(128256, torch.bfloat16)[1])
    found = inspect_kernel(asm)
    assert (found.widths("load")[16], found.widths("store"), found.spill_bytes) == (2, {16: 2}, 0)
