"""Small graphs beside eager: those that lose are named, and the program sees nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fusec
from fusec.tools.report import run_script
from fusec.tools.report.breaks import Place
from fusec.tools.report.run_report import Seen, SeenGraph
from fusec.tools.report.run_script import Compared
from fusec.tools.report.watching import Watch
from fusec.tools.summary import GraphSummary

MADE = GraphSummary("0/0", "forward", "cpu", False, "", (), (), {})
SEEN = Seen("m.py", 1.0, (SeenGraph(MADE, Place("m.py", 3, "forward"), 1000, 0.4),))


@pytest.fixture
def watched() -> Iterator[Watch]:
    torch._dynamo.reset()
    with fusec.watch() as watched:
        yield watched


def test_a_graph_that_loses_is_left_eager() -> None:
    (text,) = replace(SEEN, compared=(Compared("0/0", 400.0, 300.0),)).advice()
    assert text.splitlines() == [
        "m.py:3 in forward",
        "10% of the time: graph forward 0/0 takes 400 us a call, eagerly 300 us",
        "-> leave this one eager: call the model itself, without torch.compile, or put "
        "@torch.compiler.disable on forward",
    ]


def test_a_graph_of_few_calls_is_not_named() -> None:
    few = replace(SEEN, graphs=(replace(SEEN.graphs[0], calls=20),))
    assert not replace(few, compared=(Compared("0/0", 400.0, 300.0),)).advice()


@pytest.mark.parametrize(("ours", "theirs"), [(300.0, 400.0), (305.0, 300.0), (8.0, 5.0)])
def test_a_graph_that_gains_or_loses_nothing_is_not_named(ours: float, theirs: float) -> None:
    assert not replace(SEEN, compared=(Compared("0/0", ours, theirs),)).advice()


@pytest.mark.parametrize("train", [False, True])
def test_a_small_graph_is_compared_once_and_the_program_sees_nothing(
    watched: Watch, train: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    compiled = torch.compile(model, backend=watched.beside.backend)
    x = torch.randn(4, 8)
    with torch.set_grad_enabled(train):
        for _ in range(6):
            made = compiled(x)
            if train:
                made.sum().backward()
    (one,) = watched.seen.compared
    assert one.compile == "0/0" and one.fusec_us > 0 and one.eager_us > 0
    assert model[1].num_batches_tracked == 6
    assert [graph.calls for graph in watched.seen.graphs] == [6] * (1 + train)


def test_random_numbers_are_those_of_a_program_that_nobody_compares(watched: Watch) -> None:
    def draws(backend: Any) -> torch.Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        compiled = torch.compile(lambda x: torch.rand_like(x) + x, backend=backend)
        return torch.stack([compiled(torch.zeros(4)) for _ in range(6)])

    assert torch.equal(draws(watched.beside.backend), draws("fusec"))


def test_what_acts_on_anything_else_is_not_repeated(watched: Watch) -> None:
    called: list[int] = []

    @torch.library.custom_op("fusec_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        called.append(1)
        return x.clone()

    counted.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: counted(x) * 2, backend=watched.beside.backend)
    for _ in range(6):
        compiled(torch.ones(4))
    assert len(called) == 6 and not watched.seen.compared


def test_a_long_call_is_not_repeated(watched: Watch) -> None:
    compiled = torch.compile(lambda x: x.lgamma(), backend=watched.beside.backend)
    x = torch.rand(run_script._MOST_BYTES // 32)
    for _ in range(6):
        compiled(x)
    assert not watched.seen.compared


def test_copies_lie_and_share_memory_as_the_program_s_tensors_do(watched: Watch) -> None:
    memory = torch.zeros(64)
    rows = torch.randn(8, 4)
    column, window = rows[:, 1], memory.as_strided((4, 3), (2, 1), 5)
    expanded, base = torch.randn(4, 1).expand(4, 3), memory[1:]
    compiled = torch.compile(
        lambda a, b, c, d: (a.sum() + b + c, d.add_(1)), backend=watched.beside.backend
    )
    for _ in range(6):
        compiled(column, window, expanded, base)
    assert torch.equal(memory[1:], torch.full((63,), 6.0)) and memory[0] == 0


def test_a_call_that_cannot_be_repeated_does_the_program_no_harm(watched: Watch) -> None:
    """Its index is beyond the table when the same memory has been counted up often enough."""
    compiled = torch.compile(lambda table, i: table[i.add_(1)], backend=watched.beside.backend)
    for _ in range(6):
        compiled(torch.ones(4), torch.zeros(1, dtype=torch.int64))
    assert not watched.seen.compared
    assert [graph.calls for graph in watched.seen.graphs] == [6]
