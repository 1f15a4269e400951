"""The bytes that ``explain`` says a kernel moves, beside those that it touches in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusec.tools.report.comparison import compare
from fusec.tools.report.emulation import Emulator, KernelRow
from tests.tools.emulator.programs import (
    MEMORY,
    PRODUCTS,
    Program,
    attention,
    ends,
    rotated,
    row,
)
from tests.tools.emulator.recorded import normal

TOLERANCE = 0.05
TABLES = 128
"""Bytes of a table in the code, of digits of 2/pi, that sines of large numbers read."""
QUICK = ("layer norm", "dropout", "a foreach kernel", "embedding")
BLOCKS = ("gpt2", "bert", "llama", "vit")
TARGETS = "sm_90", "sm_100", "sm_120"
GROUPS = ends(9, 1, 139, 1, 50)
"""None is empty: of weights that no row needs, the shapes say nothing."""


def read_by_each_expert(name: str, program: Program) -> Program:
    return replace(program, inputs=[*program.inputs[:-1], GROUPS]) if "grouped" in name else program


PROGRAMS = {name: read_by_each_expert(name, one) for name, one in (MEMORY | PRODUCTS).items()}


def rows_of(
    fn: Callable[..., Any],
    inputs: list[Tensor],
    *,
    train: bool,
    race: str = "fused",
    target: str = "sm_90",
) -> list[KernelRow]:
    torch._dynamo.reset()
    emulator = Emulator.of(target, {"race": race})
    compare(fn, inputs, train=train, backend=emulator.backend)
    return [one.row() for one in emulator.kernels if one.launches]


def check(rows: list[KernelRow]) -> None:
    assert rows
    off = [
        f"{row.graph} {row.name}: explained {row.explained:,}, touched {row.touched:,} bytes"
        for row in rows
        if abs(row.explained - row.touched) > TOLERANCE * row.touched + TABLES
    ]
    assert not off, "\n".join(off)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS],
)
def test_each_kind_of_kernel_touches_what_is_explained(name: str) -> None:
    program = PROGRAMS[name]
    check(rows_of(program.fn, program.inputs, train=program.train))


RACES = "library", "fused"


@pytest.mark.slow
@pytest.mark.parametrize("race", RACES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_of_a_block_touch_what_is_explained(target: str, block: str, race: str) -> None:
    from tests.tools.emulator import blocks  # local: it imports transformers

    torch.manual_seed(0)
    model = getattr(blocks, block)().bfloat16()
    check(rows_of(model, [normal(2, 24, 64)], train=True, race=race, target=target))


def parts(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Read halves, every second element, neighbours and few rows of tensors."""
    first, second = x.chunk(2, -1)
    return first * second, x[:, ::2] + 1, y[1:] - y[:-1], x[:3].float().sum(0), y[:, 5]


def test_parts_of_tensors_count_as_they_are_read() -> None:
    check(rows_of(parts, [normal(40, 96, dtype=torch.bfloat16), normal(40, 64)], train=False))


def partly_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first features of a head, as GPT-NeoX and Phi do."""
    width = cos.shape[-1]
    return torch.cat((rotated(x[..., :width], cos.detach(), sin.detach()), x[..., width:]), -1)


BOUNDED = {
    "keys past the diagonal": Program(attention, [row(0, 1, 1, 190, 64), row(1, 1, 1, 700, 64),
        row(2, 1, 1, 700, 64)], "", train=True),
    "a rotary embedding of a part": Program(partly_rotated, [row(0, 2, 3, 10, 96),
        row(1, 10, 32), row(2, 10, 32)], "", train=True),
}  # fmt: skip
"""What indices read, conditions bound."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_what_conditions_leave_out_is_not_explained(name: str) -> None:
    program = BOUNDED[name]
    check(rows_of(program.fn, program.inputs, train=program.train))
