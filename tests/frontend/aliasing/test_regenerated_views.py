"""Results that AOTAutograd makes again with another gradient are found in Dynamo's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fusec.frontend.aliasing.regenerated_views import loses_gradients
from tests.support import TORCH, check, values


def doubled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def found(fn: Callable[..., Any]) -> bool:
    """Return what is said of a function's one graph."""
    said: list[bool] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        said.append(loses_gradients(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(torch.ones(2, 3, requires_grad=True))
    (one,) = said
    return one


def hooked(tensor: torch.Tensor) -> torch.Tensor:
    tensor.register_hook(doubled)
    return tensor


class Reversed(torch.autograd.Function):
    """Gradient reversal, as in domain-adversarial training: the values are the argument's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class ReversedCopy(Reversed):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def quiet(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.view(-1)


def both(y: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return view(y), y


def part_of_written(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    first, second = y.split(1)
    y.mul_(3)
    return first, second, y


def written_behind(
    view: Callable[[torch.Tensor], torch.Tensor], data: bool = False
) -> Callable[..., Any]:
    """Return a function that adds with gradients to a detached copy of an input's memory."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        other = (BUFFER.data if data else BUFFER.detach()).add_(x)
        return view(other)

    return fn


BUFFER = torch.zeros(2, 3)
CASES = {
    "a detached input, written": (written_behind(lambda d: d), True),
    "a view of it": (written_behind(lambda d: d.view(-1)), True),
    "what is computed of it": (written_behind(lambda d: d * 2), False),
    "an input's data, written": (written_behind(lambda d: d[0], data=True), True),
    "a detached result, written": (
        lambda x: both(torch.ones(2, 3), lambda y: y.detach().add_(x)),
        True,
    ),
    "a part of what was written since": (part_of_written, True),
    "a hook on a view of an input": (lambda x: hooked(x.view(-1)), True),
    "a hook on a view of a result": (lambda x: both(x * 2, lambda y: hooked(y[0])), True),
    "a hook on the only view": (lambda x: hooked((x * 2).view(-1)), False),
    "a hook on what is viewed": (
        lambda x: both(hooked(x * 2), lambda y: y[0]),
        TORCH < (2, 13),  # which traces a hook as a function of one's own
    ),
    "a hook on a view that is only read": (lambda x: hooked(x.view(-1)) * 2, False),
    "a function's gradient of a view": (
        lambda x: both(x * 2, lambda y: Reversed.apply(y[0])),
        True,
    ),
    "a function's gradient": (lambda x: both(x * 2, Reversed.apply), True),
    "the same by itself, too": (lambda x: Reversed.apply(x * 2), False),
    "a function's gradient of a copy": (lambda x: both(x * 2, ReversedCopy.apply), False),
    "a function's gradient of what is only read": (
        lambda x: both(x * 2, lambda y: Reversed.apply(y) * 2),
        False,
    ),
    "a view of a view without gradient": (lambda x: quiet(x)[1:], True),
    "the same of a result": (lambda x: both(x * 2, lambda y: quiet(y)[1:]), True),
    "the same by itself": (lambda x: quiet(x * 2)[1:], True),
    "a view without gradient": (lambda x: quiet(x), False),
    "plain views": (lambda x: both(x * 2, lambda y: y.t()[1:]), False),
}


@pytest.mark.parametrize("name", CASES)
def test_graphs_whose_gradients_would_change_are_found(name: str) -> None:
    fn, expected = CASES[name]
    assert found(fn) is expected


@pytest.mark.parametrize("name", [name for name in CASES if "function" in name])
def test_the_gradient_of_a_function_of_one_s_own_is_eager_s(name: str) -> None:
    check(CASES[name][0], values(2, 3), train=True)
