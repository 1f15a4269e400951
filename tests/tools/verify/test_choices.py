"""Results that torch leaves open: comparisons accept each right one, and no wrong one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusec.errors import WrongGraph, WrongKernel
from fusec.frontend.call import AtenCall
from fusec.frontend.value import ZERO, Value
from fusec.ir.dtype import I64
from fusec.tools.report.comparison import compare
from fusec.tools.verify.kernels import OwnChoices
from tests.planted import lower

EXPERTS, CHOSEN = 16, 2


def logits() -> Tensor:
    """Return lines in which several elements are the greatest."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 4, (60, EXPERTS), generator=generator).float()


def routed(x: Tensor) -> tuple[Tensor, ...]:
    """Choose experts, and compute what depends on which."""
    weight, place = torch.topk(x, CHOSEN)
    counts = F.one_hot(place, EXPERTS).sum((0, 1))
    return torch.softmax(weight, -1), place, counts, torch.cos(place.float() + weight)


def run(fn: Callable[..., tuple[Tensor, ...]], *, train: bool = False) -> None:
    """Run a function with each kernel and graph compared, and raise for a difference."""
    torch._dynamo.reset()
    options = {"verify": True, "strict": True, "cache": False}
    x = logits().requires_grad_(train)
    made = torch.compile(fn, backend="fusec", options=options)(x)
    if train:
        (made[0].square() + made[3]).sum().backward()


def test_eager_s_choice_is_another_one() -> None:
    with OwnChoices() as own:
        places = torch.topk(logits(), CHOSEN).indices
    assert own.differ
    assert torch.equal(places, logits().sort(stable=True, descending=True)[1][:, :CHOSEN])
    with OwnChoices() as own:
        torch.topk(torch.arange(9.0).reshape(1, 9), CHOSEN)
    assert not own.differ


@pytest.mark.parametrize("train", [False, True])
def test_kernels_graphs_and_models_that_choose_the_first_agree(train: bool) -> None:
    assert compare(routed, [logits()], train=train).faults == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(routed, train=train)


def test_elements_that_are_taken_twice_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def the_greatest(rule: Any, call: AtenCall, x: Value, k: int, *how: Any) -> tuple[Value, ...]:
        values, places = rule(call, x, k, *how)
        first = call.scratch("first", places.shape, I64, lambda at: places.at((*at[:-1], ZERO)))
        return values, first

    lower(monkeypatch, torch.ops.aten.topk.default, the_greatest)
    assert compare(routed, [logits()]).faults
    with pytest.raises((WrongKernel, WrongGraph)):
        run(routed)


def test_a_choice_excuses_nothing_else() -> None:
    """Of a wrong result beside a choice, the difference from eager's choice is said."""

    def beside(x: Tensor) -> tuple[Tensor, ...]:
        return *routed(x), torch.cos(x) + (0.1 if torch.compiler.is_compiling() else 0)

    assert compare(beside, [logits()]).faults
