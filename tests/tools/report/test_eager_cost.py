"""What eager execution launches and moves: each operation that computes, its tensors once each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fusec.driver.observers import Observer, observing
from fusec.errors import ModelError
from fusec.tools.report.eager_cost import EagerCost, count_eager, graph_cost, tensor_bytes
from fusec.tools.report.observe import new_fake_mode

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
        (lambda a: a[:0].exp().sum(), [x], [0, 4]),  # a call of empty tensors is one, too
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


def images(x: torch.Tensor) -> torch.Tensor:
    norm = F.group_norm(F.conv2d(x, torch.ones(4, 4, 3, 3)), 2, torch.ones(4), torch.zeros(4))
    return F.silu(norm)


def rows(x: torch.Tensor) -> torch.Tensor:
    y = F.gelu(F.linear(x, torch.ones(16, 16), torch.ones(16)))
    return F.layer_norm(F.layer_norm(y, (16,)), (16,)).softmax(1)


def loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.layer_norm(x, (16,))
    return x.exp().relu()


def loss(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, torch.zeros(8, dtype=torch.int64)) + F.smooth_l1_loss(
        x, torch.ones(8, 16)
    )


def costs_seen_by_the_compiler(
    run: Callable[..., Any], given: torch.Tensor, train: bool
) -> list[EagerCost]:
    """Return the cost of eager, as the graphs say that the compiler gets."""
    found: list[EagerCost] = []

    class Costs(Observer):
        def compiled(self, gm: fx.GraphModule, *_: Any) -> None:
            found.append(graph_cost(gm))

    torch._dynamo.reset()
    with observing(Costs()), torch.set_grad_enabled(train), warnings.catch_warnings():
        made = torch.compile(run, backend="fusec")(given)
        if train:
            made.sum().backward()
    return found


@pytest.mark.parametrize(
    ("run", "train"), [(rows, False), (images, True), (rows, True), (loop, True), (loss, True)]
)
def test_what_was_taken_apart_is_counted_as_the_program_calls_it(
    run: Callable[..., Any], train: bool
) -> None:
    given = torch.randn((2, 4, 8, 8) if run is images else (8, 16), requires_grad=train)
    seen = costs_seen_by_the_compiler(run, given, train)
    mode = new_fake_mode()
    with mode, torch.set_grad_enabled(train):
        fake = mode.from_tensor(given.detach()).requires_grad_(train)
        graph = fx.symbolic_trace(run)
        forward, backward = count_eager(graph, [fake])
    fills = ("ones", "zeros", "full")
    expected = [
        [c for c in cost.calls if c.op.split(".")[0] not in fills] for cost in (forward, backward)
    ]
    for one, calls in zip(seen, expected, strict=False):
        own = [c.op.split(".")[0] for c in one.calls if c.op.split(".")[0] not in fills]
        assert sorted(own) == sorted(c.op.split(".")[0] for c in calls)
    assert len(seen) == 1 + train
