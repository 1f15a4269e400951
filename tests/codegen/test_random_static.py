"""Random numbers in machine code, without a GPU: how many counters a thread computes.

LLVM merges the counters of neighbours because it sees that the bits in which their indices differ
are shifted out. Nothing in the kernel's source says so, hence these counts.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fusec.ir.dtype import F32, I64
from fusec.ir.index import Axis, IntoIndex, index
from fusec.ir.machine import CodeTuning
from fusec.ir.program import Program
from fusec.tools.assembly import assembly_of
from fusec.tools.report.static_report import check_kernels
from tests.codegen.kernels import triton_source
from tests.codegen.programs import Builder, buffer
from tests.codegen.test_contraction_static import staged, tensors

PRODUCTS = 20
"""64-bit products of one counter: two in each of ten rounds; the first has one of 0 less."""


def draws(extents: tuple[int, ...], lanes: tuple[int, ...]) -> Program:
    """Return y[i, j] = f32(random(seed, i*J + j)) with tiles of so many lanes."""
    outer = [Axis("o", index(e // n)) for e, n in zip(extents, lanes, strict=True)]
    inner = [Axis("i", index(n)) for n in lanes]
    at: IntoIndex = index(0)
    for extent, n, o, i in zip(extents, lanes, outer, inner, strict=True):
        at = at * extent + index(o) * n + index(i)
    b = Builder("draws", tuple(outer), tuple(inner))
    seed = b.load(buffer("seeds", I64, 4), 2)
    b.put(buffer("y", F32, *extents), at, b.cast(b.op("random", seed, b.position(at)), F32))
    return b.program()


def counters(program: Program) -> float:
    """Return how many counters a thread computes, by the wide products in its machine code."""
    text = assembly_of(triton_source(program), "sm_90").text("ptx")
    wide = re.findall(r"mul\.(?:hi|wide)\.u32", text)
    return len(wide) / PRODUCTS


SHAPES = (
    ((2**20,), (1024,)),
    ((64, 8192), (1, 1024)),
    ((256, 4096), (32, 32)),
    ((2**18, 2**14), (1, 1024)),
)


@pytest.mark.parametrize(("extents", "lanes"), SHAPES, ids=str)
def test_four_neighbours_share_a_counter(extents: tuple[int, ...], lanes: tuple[int, ...]) -> None:
    assert 1.5 < counters(draws(extents, lanes)) <= 2.1  # 8 elements a thread


def test_a_product_of_philox_is_one_instruction_in_ptx() -> None:
    """Without the function in PTX, LLVM computes halves of a third of them by themselves."""
    program = draws((2**20,), (1024,))
    plain, short = (
        assembly_of(triton_source(replace(program, code=CodeTuning(ptx=ptx))), "sm_90").text("ptx")
        for ptx in (False, True)
    )
    products = [len(re.findall(r"\bmul\.(?:hi|lo|wide)\.\w+", text)) for text in (plain, short)]
    assert products[1] <= products[0] - 10 and "mul.hi" not in short


def test_rows_that_are_no_multiple_of_four_share_less() -> None:
    assert counters(draws((64, 8190), (1, 1024))) > 4


def dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.1, True)


def test_a_dropout_in_bf16_waits_for_memory() -> None:
    """Its instructions fit beside its bytes: no `issue-bound` warning, in either direction."""
    graphs = staged(dropout, *tensors((8192, 8192)), train=True)
    found = check_kernels(graphs)
    assert len(graphs) == 2 and not found.faults and not found.warnings


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1)
    return F.dropout(weights, 0.1, True) @ v


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "most"), ((0.0, 4.4), (0.1, 8.2)))
def test_a_gelu_takes_less_than_with_an_erf(rate: float, most: float) -> None:
    """With one, and with products of Philox in halves: 5.1, and 9.3 with draws."""

    def activated(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(x + b), rate, True)

    (kernel,) = check_kernels(staged(activated, *tensors((8192, 16384), (16384,)))).kernels
    assert kernel.instructions_per_byte is not None
    assert kernel.instructions_per_byte <= most


@pytest.mark.slow
def test_attention_with_dropout_spills_nothing_and_stores_no_mask() -> None:
    shape = (4, 16, 1024, 64)
    bytes_of_a_tensor = 4 * 16 * 1024 * 64 * 2
    found = check_kernels(staged(attention, *tensors(shape, shape, shape), train=True))
    assert not [fault for fault in found.faults if fault.rule == "spills"]
    forward, backward = found.graphs
    assert forward.bytes_moved <= 4.1 * bytes_of_a_tensor
    assert backward.bytes_moved <= 12.5 * bytes_of_a_tensor
