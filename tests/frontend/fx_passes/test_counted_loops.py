"""Loops of ``torch.while_loop`` that count to a known number become scans; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

import fusec
from bench.workload import backend_of
from tests.support import BACKEND, check, externs, trains_scans, values

A, B = values(12, 5), values(3, 5, seed=1)
Loop = Callable[..., Any]


def row(a: Tensor, i: Tensor) -> Tensor:
    return a.index_select(0, i.view(1))[0]


def counting(proceeds: Callable[..., Any], start: int = 0, step: int = 1) -> Loop:
    """Return a loop over ``h = a[i]*h + i``, which also returns what it counted to."""

    def loop(a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        def body(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return i + step, row(a, i % 12) * h + i

        first = torch.full((), start, dtype=torch.int64)
        i, h = while_loop(lambda i, h: proceeds(i, a), body, (first, h))
        return h, i

    return loop


def decaying(a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return all states of ``h = a[i]*h + b``, which it carries, and the last one."""

    def body(rows: Tensor, i: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = row(a, i) * h + 0.5
        return rows.index_copy(0, i.view(1), h[None]), i + 1, h

    start = a.new_zeros(12, 3, 5), torch.tensor(0), h
    rows, _, last = while_loop(lambda rows, i, h: i < rows.shape[0], body, start)
    return rows, last


def weighted(a: Tensor, h: Tensor) -> Tensor:
    w = a.t() @ a

    def body(h: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(h @ w + i), 1 + i

    return while_loop(lambda h, i: i < 7, body, (h.sin(), torch.tensor(2)))[0] * 2


COUNTED: dict[str, Loop] = {
    "less than a constant": counting(lambda i, a: i < 9),
    "up to a constant": counting(lambda i, a: i <= 9),
    "a size": counting(lambda i, a: i < a.shape[0]),
    "a size less one": counting(lambda i, a: a.shape[0] - 1 >= i),
    "every third": counting(lambda i, a: torch.lt(i, 11), 1, 3),
    "down": counting(lambda i, a: i > 0, 11, -2),
    "down to one": counting(lambda i, a: torch.ge(i, 1), 11, -1),
    "once": counting(lambda i, a: i < 1),
    "a product": weighted,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("train", (False, True), ids=("inference", "training"))
@pytest.mark.parametrize("name", COUNTED)
def test_a_loop_of_known_length_is_a_scan(name, train):
    check(COUNTED[name], A, B, train=train)
    if train:
        return  # torch does not trace the gradient of a loop on fake tensors, as `explain` does
    called = externs(COUNTED[name], A, B)
    assert {op for op, _ in called} <= {"mm.default"}  # where a library's product won its race


@trains_scans
def test_stored_states_have_the_gradients_of_a_loop_of_python():
    """Torch's own gradient of this loop, 2.13, is another one."""

    def unrolled(a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for i in range(12):
            h = a[i] * h + 0.5
            rows.append(h)
        return torch.stack(rows), h

    check(decaying, A, B)
    assert externs(decaying, A, B) == []
    torch._dynamo.reset()
    compiled = torch.compile(decaying, backend=backend_of(BACKEND), fullgraph=True)
    found, wanted = [], []
    for loop, gradients in ((compiled, found), (unrolled, wanted)):
        given = [x.clone().requires_grad_() for x in (A, B)]
        rows, last = loop(*given)
        gradients += torch.autograd.grad((rows.sin() * 3).sum() + last.sum(), given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ("a size", "a size less one", "a product"))
def test_a_loop_as_long_as_an_axis_has_one_graph_for_all_lengths(name):
    other = values(9, 5, seed=3), B
    check(COUNTED[name], A, B, dynamic=True, more=(other,))


def test_a_number_of_python_may_count():
    def body(i: int, h: Tensor) -> tuple[int, Tensor]:
        return i + 2, h.sin() + i

    def loop(h: Tensor) -> tuple[Tensor, Tensor]:
        i, h = while_loop(lambda i, h: i < 7, body, (1, h))
        return h * i, h

    check(loop, B)
    assert externs(loop, B) == []


def both_ways(h: Tensor) -> Tensor:
    def body(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return i + torch.where(h.sum() > 1e9, 2, 1), h.sin()

    return while_loop(lambda i, h: i < 5, body, (torch.tensor(0), h))[1]


def of_no_step(h: Tensor) -> tuple[Tensor, Tensor]:
    step = (lambda i, h: i < 0), (lambda i, h: (i + 1, h * 0.5))
    return while_loop(*step, (torch.tensor(0), h))


def of_f64(h: Tensor) -> Tensor:
    step = (lambda i, h: i < 5), (lambda i, h: (i + 1, h + i * 0.1))
    return while_loop(*step, (0, h.double()))[1]


def wrapping(dtype: torch.dtype) -> Loop:
    unit = 1 << (torch.iinfo(dtype).bits - 4)

    def loop(h: Tensor) -> tuple[Tensor, Tensor]:
        step = (lambda i, h: i < 7 * unit), (lambda i, h: (i + 5 * unit, h * 0.5 + 1))
        return while_loop(*step, (torch.tensor(0, dtype=dtype), h))

    return loop


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_a_number_that_may_wrap_does_not_count(dtype):
    check(wrapping(dtype), B)


def test_a_loop_within_a_loop_has_eager_s_gradient():
    def loop(h: Tensor) -> Tensor:
        def body(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            inner = while_loop(lambda j, g: j < 3, lambda j, g: (j + 1, g * 0.5), (zero, h))[1]
            return i + 1, inner + i

        zero = torch.tensor(0)
        return while_loop(lambda i, h: i < 4, body, (torch.tensor(0), h))[1]

    check(loop, B, train=True)
    check(loop, B)


def test_floats_of_a_number_of_python_are_of_f64():
    check(of_f64, B)


@pytest.mark.parametrize("loop", (both_ways, of_no_step), ids=lambda loop: loop.__name__)
def test_other_loops_keep_their_condition(loop):
    check(loop, B)
    report = fusec.explain(loop, B)
    assert [found.rows for found in report.graphs[0].loops] == [0]


def test_numbers_that_are_wider_as_tensors_stay_with_torch():
    def loop(h: Tensor) -> Tensor:
        step = (lambda i, h: i < 5), (lambda i, h: (i + 1, h * 2 + torch.full((), i)))
        return while_loop(*step, (0, h))[1]

    check(loop, B)
