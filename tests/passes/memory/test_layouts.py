"""Values between kernels lie in memory as these walk them, and are what eager computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.codegen.targets import find_target
from fusec.driver.context import CompileContext
from fusec.driver.pipeline import compile_to_source
from fusec.driver.trace import Trace
from fusec.ir.buffer import Buffer
from fusec.ir.graph import Schedule
from fusec.ir.index import index
from fusec.options import Options
from fusec.tools.report.observe import observe
from tests.support import TRAINED, check

CHANNELS = 40


def scheduled(function: Callable[..., object], *inputs: Tensor, target: str = "cpu") -> Schedule:
    """Return the forward's kernels, with the library's products."""
    (stage,) = observe(function, inputs)
    options = Options.from_compile(None, {"race": "library"})
    context = CompileContext(find_target(target), options, Trace("layouts"))
    return compile_to_source(stage.graph, context).schedule


def between(schedule: Schedule) -> list[Buffer]:
    """Return the buffers that one kernel writes, and another one reads."""
    read = {buffer for kernel in schedule.kernels for buffer in kernel.reads}
    return [b for kernel in schedule.kernels for b in kernel.writes if b in read]


def turned(schedule: Schedule) -> list[str]:
    return [b.name for b in between(schedule) if not b.is_row_major]


def along_time(x: Tensor, taps: Tensor) -> Tensor:
    """Return x[b, t, c] convolved along t, as [b, c, t]: each is a sum of products, stored once."""
    return F.conv1d(x.mT, taps, padding=3, groups=CHANNELS)[..., : x.shape[-2]]


def mixer(x: Tensor, taps: Tensor) -> Tensor:
    """Between two walks along channels is one along time, as convolutions are written."""
    h = along_time(x, taps)
    return (h.cumsum(-1) * h.sigmoid()).mT.contiguous()


def returned(x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    h = along_time(x, taps)
    return h, (h.cumsum(-1) * h.sigmoid()).mT.contiguous()


def multiplied(x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    h = along_time(x, taps)
    return (h.cumsum(-1) * h.sigmoid()).mT.contiguous(), h @ h.mT


def inputs(*more: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*more, 70, CHANNELS), torch.randn(CHANNELS, 1, 4)


def test_what_is_walked_along_channels_has_them_side_by_side() -> None:
    schedule = scheduled(mixer, *inputs(2))
    (buffer,) = between(schedule)
    assert buffer.shape == (index(2), index(CHANNELS), index(70))
    assert buffer.strides == (index(70 * CHANNELS), index(1), index(CHANNELS))


@pytest.mark.parametrize("function", (returned, multiplied))
def test_what_callers_and_libraries_read_stays_as_they_know_it(function: Callable) -> None:
    assert turned(scheduled(function, *inputs(2))) == []
    check(function, *inputs(2))


def test_what_is_walked_as_it_lies_stays() -> None:
    x, taps = torch.randn(2, CHANNELS, 70), inputs()[1]
    schedule = scheduled(lambda x, taps: mixer(x.mT, taps).mT.contiguous(), x, taps)
    assert between(schedule) and turned(schedule) == []


@TRAINED
def test_values_and_gradients_are_those_of_eager(train: bool) -> None:
    check(mixer, *inputs(2), train=train)


def test_sizes_that_change_from_call_to_call() -> None:
    check(
        mixer,
        *inputs(2),
        dynamic=True,
        more=[inputs(3), (torch.randn(2, 9, CHANNELS), inputs()[1])],
    )
