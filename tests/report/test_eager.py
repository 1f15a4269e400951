"""What eager execution launches and moves: each operation that computes, its tensors once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusec.errors import ModelError
from fusec.report.eager import count_eager, tensor_bytes
from fusec.report.observe import new_fake_mode

x = torch.empty(8, 16)
table = torch.empty(1000, 16)
few = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("run", "inputs", "moved"),
    [
        (lambda a: a + a.t().t(), [x], [3 * 512]),  # views cost nothing
        (lambda a: a.exp().sum(), [x], [1024, 512 + 4]),
        (lambda a: torch.empty_like(a).copy_(a), [x], [1024]),  # what is there is not read
        (lambda a: torch.empty_like(a).fill_(1.0), [x], [512]),
        (lambda a: a.mul_(2.0), [x], [1024]),
        (lambda t, n: t[n], [table, few], [2 * 256 + 32]),  # the rows that are gathered
        (lambda a: a.unsqueeze_(0), [x], []),
        (lambda a: a.sum().item(), [x], [512 + 4]),
        (lambda a: a.expand(4, 8, 16) + 1.0, [x], [512 + 2048]),  # what is repeated is read once
    ],
)
def test_each_operation_has_its_bytes(
    run: Callable[..., Any], inputs: list[torch.Tensor], moved: list[int]
) -> None:
    mode = new_fake_mode()
    fake = [mode.from_tensor(tensor) for tensor in inputs]
    with mode, torch.no_grad():
        forward, backward = count_eager(run, fake)
    assert [call.bytes for call in forward.calls] == moved
    assert (forward.launches, forward.bytes) == (len(moved), sum(moved))
    assert backward.launches == 0


def test_products_of_several_types_are_the_model_s_own_error() -> None:
    mode = new_fake_mode()
    fake = [mode.from_tensor(torch.empty(4, 4, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    with mode, pytest.raises(ModelError, match="give it one type"):
        count_eager(torch.ops.aten.mm.default, fake)


def test_an_expanded_axis_counts_once_unless_it_is_empty() -> None:
    assert tensor_bytes(torch.empty(1, 16).expand(8, 16)) == 64
    assert tensor_bytes(torch.empty(1, 16).expand(0, 16)) == 0
