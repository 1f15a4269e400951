"""Short tensors that a program makes of numbers: expressions of their index, and no tensors."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusec.frontend.key import graph_key
from fusec.frontend.ops.literals import LONGEST
from fusec.ir.extern import Constant
from fusec.ir.graph import Def, Extern
from tests.frontend.tracing import Captured, body, notation_of, traced

TENSORS = {
    "f32": torch.tensor([0.485, math.nan, -0.0, math.inf, 1e-42]),
    "bf16": torch.tensor([[0.1, -0.0], [math.nan, 0.1]], dtype=torch.bfloat16),
    "f16 of one number": torch.tensor(0.1, dtype=torch.float16),
    "f64": torch.tensor([[[0.1], [0.1]], [[0.1], [0.3]]], dtype=torch.float64),
    "i64": torch.tensor([2**62 + 1, -(2**63), 0, 0, 2**63 - 1]),
    "u8": torch.tensor([255, 0, 7], dtype=torch.uint8),
    "bool": torch.tensor([True, True, False] * 5 + [True]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_it_has_exactly_the_program_s_numbers(name: str) -> None:
    given = TENSORS[name]
    numbers, dtype = given.tolist(), given.dtype
    captured = Captured(lambda x: (torch.tensor(numbers, dtype=dtype), x + 1))
    found, _ = captured(torch.zeros(2))
    assert found.dtype is dtype and found.shape == given.shape
    torch.testing.assert_close(found, given, rtol=0, atol=0, equal_nan=True)
    assert ((found.signbit() == given.signbit()) | given.isnan()).all()
    assert not captured.externs


def test_where_it_is_read_it_is_part_of_the_expression() -> None:
    captured, x = Captured(lambda x: x - torch.tensor([0.5, 0.25, 0.25])[:, None]), torch.ones(3, 2)
    assert captured(x).tolist() == [[0.5] * 2, [0.75] * 2, [0.75] * 2]
    line, _ = body(captured.graphs[0])
    assert line.endswith(" - where((i0):i64 < (1):i64, 0.5, 0.25)")


def test_each_call_has_a_tensor_of_its_own_which_may_be_changed() -> None:
    def changed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = torch.tensor([1.0, 2.0, 3.0])
        t.mul_(2)
        t[1] = 7
        return x * t, t

    captured, x = Captured(changed), torch.ones(3)
    captured(x)[1].zero_()
    assert captured(x)[1].tolist() == changed(x)[1].tolist() == [2, 7, 6]


def test_an_eager_kernel_takes_it_as_a_tensor() -> None:
    captured = Captured(lambda x: torch.bincount(torch.tensor([1, 1, 2]), minlength=3) + x)
    assert captured(torch.zeros(3)).tolist() == [0, 2, 1]


def test_longer_ones_are_constants() -> None:
    numbers = list(range(LONGEST + 1))
    captured = Captured(lambda x: torch.tensor(numbers) + x)
    assert captured(torch.zeros(LONGEST + 1)).tolist() == numbers
    assert [extern.target for extern in captured.externs] == ["get_attr"]


def test_complex_ones_are_expressions() -> None:
    captured = Captured(lambda x: x * torch.tensor([1j, 2 - 3j]))
    assert captured(torch.ones(2)).tolist() == [1j, 2 - 3j]
    assert captured.externs == []


@pytest.mark.parametrize("dtype", (torch.uint16,))
def test_those_of_types_that_kernels_do_not_compute_with_are_constants(dtype: torch.dtype) -> None:
    captured = Captured(lambda x: (torch.tensor([0, 1, 2], dtype=dtype), x + 1))
    found, _ = captured(torch.zeros(2))
    assert found.dtype is dtype and found.float().tolist() == [0, 1, 2]
    assert "get_attr" in [extern.target for extern in captured.externs]


def scaled(x: torch.Tensor, number: float) -> torch.Tensor:
    return x * torch.tensor([0.5, number])


def test_graphs_that_differ_in_their_numbers_have_keys_of_their_own() -> None:
    keys = [
        graph_key(traced(partial(scaled, number=number), torch.ones(2)))
        for number in (0.25, 0.75, 0.25)
    ]
    assert keys[0] == keys[2] != keys[1]


def test_on_a_gpu_its_numbers_are_copied_by_nobody() -> None:
    def moved(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([0.5, 0.25]).to(x.device)

    def taken(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, torch.tensor([0, 1]).sort().values

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 2, device="cuda")
        inside, beside = (notation_of(make_fx(f)(x)) for f in (moved, taken))
    assert {type(node) for node in inside.nodes} == {Def}
    assert {type(node) for node in beside.nodes} == {Def, Extern, Constant}
